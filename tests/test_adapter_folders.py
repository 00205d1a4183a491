"""Adapters whose base grew: their folder holds the growth, and each way to load it gives both back, or says why not."""

import copy
import json
import subprocess
import sys
import warnings

import pytest
import torch
from families import build
from packaging.version import Version
from safetensors.torch import load_file, safe_open
from test_peft import ALL, BATCHES, GROWTH, LLAMA, adapted, logits, lora, near, peft, pytestmark  # noqa: F401
from transformers import AutoModelForCausalLM
from transformers.integrations.peft import MIN_PEFT_VERSION

from hf_growattn import Grower, load_growth, patch_model, save_growth
from hf_growattn.growable.growths import dims_of, extra_parameters
from hf_growattn.training.callback import set_saved_dims

CAUSAL = {"targets": ALL[LLAMA], "task_type": "CAUSAL_LM"}


@pytest.fixture(scope="module", params=["grown under adapters", "grown before"])
def saved(request, tmp_path_factory):
    """A stock base, a folder of adapters of which it grew, and what the two compute together."""
    folder = tmp_path_factory.mktemp("saved")
    build(LLAMA).save_pretrained(folder / "base")
    model = patch_model(AutoModelForCausalLM.from_pretrained(folder / "base"))
    if request.param == "grown before":
        Grower(model, GROWTH).find(BATCHES).keep()
    model = peft.get_peft_model(model, lora(LLAMA, init_lora_weights=False, **CAUSAL)).eval()
    if request.param != "grown before":
        around = torch.nn.ModuleDict({"policy": model})
        Grower(around, GROWTH, loss=lambda _, batch: model(**batch).loss).find(BATCHES).keep()
    model.save_pretrained(folder / "adapters")
    with safe_open(folder / "adapters" / "growth" / "growth.safetensors", "pt") as file:
        assert file.metadata()["base"] == str(folder / "base")
    (folder / "trained").write_text(str(request.param != "grown before"))
    return folder, logits(model)


def stock(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "base")


def second_name(folder):
    model = peft.PeftModel.from_pretrained(stock(folder), folder / "adapters")
    model.load_adapter(folder / "adapters", "other")
    model.set_adapter("other")
    return model


def same_name(folder):
    model = peft.get_peft_model(stock(folder), lora(LLAMA, ALL[LLAMA]))
    model.load_adapter(folder / "adapters", "default", is_trainable=True)  # as Trainer resumes
    return model


def own_adapters(folder):
    model = stock(folder)
    model.load_adapter(str(folder / "adapters"))
    return model


def saved_by_transformers(folder):
    own_adapters(folder).save_pretrained(folder / "own")
    model = stock(folder)
    model.load_adapter(str(folder / "own"))
    return model


def saved_again(folder):
    model = peft.PeftModel.from_pretrained(stock(folder), folder / "adapters")
    model.save_pretrained(folder / "again", state_dict=model.state_dict())  # as Trainer does
    return peft.PeftModel.from_pretrained(stock(folder), folder / "again")


def in_a_subfolder(folder):
    return peft.PeftModel.from_pretrained(stock(folder), folder, subfolder="adapters")


WAYS = {
    "a stock base": lambda folder: peft.PeftModel.from_pretrained(stock(folder), folder / "adapters"),
    "a patched base": lambda folder: peft.PeftModel.from_pretrained(patch_model(stock(folder)), folder / "adapters"),
    "AutoPeftModel": lambda folder: peft.AutoPeftModelForCausalLM.from_pretrained(folder / "adapters"),
    "AutoModel": lambda folder: AutoModelForCausalLM.from_pretrained(folder / "adapters"),
    **{
        way.__name__: way
        for way in (second_name, same_name, own_adapters, saved_by_transformers, saved_again, in_a_subfolder)
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_a_folder_of_adapters_loads_with_the_growth(saved, way):
    folder, expected = saved
    needed = {"saved_by_transformers": MIN_PEFT_VERSION, "own_adapters": "0.21", "AutoModel": "0.21"}.get(way, "0")
    if Version(peft.__version__) < Version(needed):
        pytest.skip("transformers asks for a newer peft")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
        loaded = WAYS[way](folder).eval()
    assert torch.equal(logits(loaded), expected)
    for file in folder.rglob("adapter_config.json"):
        assert json.loads(file.read_text())["base_model_name_or_path"] == str(folder / "base")
    # Only those train that did, and only where adapters are loaded to be trained: peft had frozen what grew before.
    trained = (folder / "trained").read_text() if way == "same_name" else "False"
    assert {str(p.requires_grad) for p in extra_parameters(loaded)} == {trained}
    assert torch.equal(logits(copy.deepcopy(loaded)), expected)


def test_a_second_adapter_lets_new_dims_train_or_not_as_they_did(saved):
    model = peft.PeftModel.from_pretrained(stock(saved[0]), saved[0] / "adapters", is_trainable=True)
    before = [p.requires_grad for p in extra_parameters(model)]
    model.load_adapter(saved[0] / "adapters", "other")
    assert [p.requires_grad for p in extra_parameters(model)] == before


def test_without_the_library_peft_stops_at_the_type(saved):
    script = """
import sys, peft, transformers
peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(f"{sys.argv[1]}/base"), sys.argv[2])
"""
    for first, works in (("", False), ("import hf_growattn", True)):  # before peft, as sorted imports have it
        words = [sys.executable, "-c", first + script, str(saved[0]), str(saved[0] / "adapters")]
        run = subprocess.run(words, capture_output=True, text=True)
        assert (run.returncode == 0) == works, run.stderr
        assert works or "KeyError: 'import hf_growattn to load LORA'" in run.stderr


def test_weights_of_adapters_alone_say_what_they_lack(saved):
    config = peft.PeftConfig.from_pretrained(saved[0] / "adapters")
    model = peft.get_peft_model(stock(saved[0]), config)
    with pytest.warns(UserWarning, match="trained with a growth of their base, which these weights lack"):
        peft.set_peft_model_state_dict(model, peft.load_peft_weights(str(saved[0] / "adapters")))


def test_adapters_of_another_growth_are_refused_next_to_others(saved, tmp_path):
    other = adapted(LLAMA, **CAUSAL)
    other.save_pretrained(tmp_path)
    assert not (tmp_path / "growth").exists()
    before = logits(other)
    with pytest.raises(ValueError, match=r"Other adapters of this model were trained without.*a model of its own"):
        other.load_adapter(saved[0] / "adapters", "other")
    assert torch.equal(logits(other), before) and not dims_of(other)


def test_adapters_without_a_growth_next_to_some_with_one_are_warned_of(saved, tmp_path):
    adapted(LLAMA, **CAUSAL).save_pretrained(tmp_path)
    model = peft.PeftModel.from_pretrained(stock(saved[0]), saved[0] / "adapters")
    with pytest.warns(UserWarning, match="was trained without the new dims that its base has here"):
        model.load_adapter(tmp_path, "other")


@pytest.mark.parametrize("name", ["model.embed_tokens", "input_layernorm", "q_proj", "o_proj"])
def test_a_module_that_trains_whole_is_no_other_base(tmp_path, name):
    """The base stays as it was: peft trains a copy of the module."""
    build(LLAMA).save_pretrained(tmp_path / "base")
    model = adapted(LLAMA, r".*(gate|k)_proj", modules_to_save=[name], task_type="CAUSAL_LM")
    Grower(model, GROWTH).find(BATCHES).keep()
    for parameter in (p for p in model.parameters() if p.requires_grad):
        parameter.data += 0.3
    model.save_pretrained(tmp_path / "adapters")
    loaded = peft.PeftModel.from_pretrained(stock(tmp_path), tmp_path / "adapters").eval()
    near(logits(loaded), logits(model))
    other = stock(tmp_path)
    other.model.layers[1].mlp.up_proj.weight.data += 1
    with pytest.raises(ValueError, match="other weights"):
        peft.PeftModel.from_pretrained(other, tmp_path / "adapters")


def test_added_tokens_are_no_other_base(tmp_path):
    base, model = build(LLAMA), patch_model(build(LLAMA))
    assert not base.config.tie_word_embeddings
    Grower(model, GROWTH).find(BATCHES).keep()
    for more in (0, 9):
        model.resize_token_embeddings(model.config.vocab_size + more)
        save_growth(model, tmp_path)
        load_growth(patch_model(build(LLAMA)), tmp_path)
    base.resize_token_embeddings(base.config.vocab_size + 5)
    load_growth(patch_model(base), tmp_path)


def test_a_growth_beside_adapters_goes_with_a_save_that_has_none(tmp_path):
    model = adapted(LLAMA, **CAUSAL)
    Grower(model.get_base_model(), GROWTH).find(BATCHES).keep()
    model.save_pretrained(tmp_path)
    assert not any(".extra." in name for name in load_file(tmp_path / "adapter_model.safetensors"))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "import hf_growattn to load LORA"
    (tmp_path / "growth" / "theirs.txt").write_text("stays")
    adapted(LLAMA, **CAUSAL).save_pretrained(tmp_path)
    assert [path.name for path in (tmp_path / "growth").iterdir()] == ["theirs.txt"]
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "LORA"


def test_a_checkpoint_of_adapters_from_before_a_growth_takes_it_off(tmp_path):
    """As Trainer does at the end, if it was the best."""
    model = adapted(LLAMA, **CAUSAL)
    model.save_pretrained(tmp_path)
    assert Grower(model, GROWTH).find(BATCHES).keep().kept
    set_saved_dims(model, tmp_path)
    assert not dims_of(model)


def test_a_growth_goes_with_the_adapters_that_are_saved(tmp_path):
    model = adapted(LLAMA, **CAUSAL)
    model.add_adapter("other", lora(LLAMA, **CAUSAL))
    Grower(model.get_base_model(), GROWTH).find(BATCHES).keep()
    model.save_pretrained(tmp_path, selected_adapters=["other"])
    model.save_pretrained(tmp_path / "of another rank", is_main_process=False)
    assert [path.parent.parent.name for path in tmp_path.rglob("growth.safetensors")] == ["other"]


def test_a_whole_peft_model_is_read_in_another_process(tmp_path):
    model = adapted(LLAMA, ALL[LLAMA])
    assert Grower(model, GROWTH).find(BATCHES).keep().kept
    torch.save(model, tmp_path / "model")
    script = """
import sys, torch, peft, hf_growattn
model = torch.load(f"{sys.argv[1]}/model", weights_only=False)
model.save_pretrained(f"{sys.argv[1]}/saved")
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    loaded = peft.PeftModel.from_pretrained(build(LLAMA), tmp_path / "saved").eval()
    assert torch.equal(logits(loaded), logits(model))


def test_a_state_of_adapters_alone_leaves_the_growth(tmp_path):
    model = adapted(LLAMA, ALL[LLAMA])
    model.save_pretrained(tmp_path)
    assert Grower(model, GROWTH).find(BATCHES).keep().kept
    expected = logits(model)
    model.load_adapter(tmp_path, "default")
    near(logits(model), expected)
    save_growth(model, tmp_path / "growth")
    load_growth(model, tmp_path / "growth")
    near(logits(model), expected)
