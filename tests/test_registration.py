"""Classes of grown models are made when they are needed, and found wherever a config, a name or a pickle asks."""

import copy
import logging
import pickle
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from families import FAMILIES, LLAMA, build, tokens, wide
from own_family import OwnConfig, OwnForCausalLM
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_growattn import patch_model
from hf_growattn.growable import models as modeling
from hf_growattn.growable.attention import attentions
from hf_growattn.model.new_dims import ROLES


def grown(variant: str):
    return wide(variant, 4, 2)


FRESH = f"""
import sys, torch, transformers, peft
sys.path.insert(0, {str(ROOT / "tests")!r})
folder, of_peft = sys.argv[1], {{"auto"}}
def families():
    names = [name.split(".") for name in sys.modules if name.startswith("transformers.models.")]
    return sorted({{n[2] for n in names if n[-1].startswith("modeling_")}} - of_peft)
of_peft.update(families())
import hf_growattn
from families import tokens
assert not families(), families()
model = transformers.AutoModelForCausalLM.from_pretrained(f"{{folder}}/llama").eval()
assert families() == ["llama"], families()
torch.save(model(tokens()).logits, f"{{folder}}/llama.logits")
model = torch.load(f"{{folder}}/gpt2.model", weights_only=False)
assert families() == ["gpt2", "llama"], families()
torch.save(model(tokens()).logits, f"{{folder}}/gpt2.logits")
config = torch.load(f"{{folder}}/mistral.config", weights_only=False)
model = torch.load(f"{{folder}}/own.model", weights_only=False)  # of a class of the user's
torch.save(model(tokens()).logits, f"{{folder}}/own.logits")
print(type(transformers.AutoModelForCausalLM.from_config(config)).__name__, type(model).__name__)
"""


def test_a_fresh_process_imports_the_families_it_needs_and_no_others(tmp_path):
    """One model is loaded, two are unpickled whole, and one is built from an unpickled config."""
    models = {"llama": grown("llama-5-bias"), "gpt2": grown("gpt2-2"), "mistral": grown("mistral")}
    models["own"] = wide(OwnForCausalLM(OwnConfig(**LLAMA | {"num_hidden_layers": 1})).eval(), 2, 1)
    models["llama"].save_pretrained(tmp_path / "llama")
    for name in ("gpt2", "own"):
        torch.save(models[name], tmp_path / f"{name}.model")
    torch.save(models["mistral"].config, tmp_path / "mistral.config")
    done = subprocess.run([sys.executable, "-c", FRESH, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [type(models[name]).__name__ for name in ("mistral", "own")]
    for name in ("llama", "gpt2", "own"):
        assert torch.equal(torch.load(tmp_path / f"{name}.logits"), models[name](tokens()).logits)


def test_classes_have_one_identity():
    model = grown("llama-2")
    assert modeling.GrowAttnLlamaForCausalLM is type(model) is type(AutoModelForCausalLM.from_config(model.config))
    assert modeling.GrowAttnLlamaConfig is type(model.config) is type(AutoConfig.for_model("growattn_llama"))
    assert modeling.GrowAttnGPT2DoubleHeadsModel.__bases__[1].__name__ == "GPT2DoubleHeadsModel"
    for absent in ("GrowAttnNothing", "GrowAttnPreTrainedModel", "LlamaModel"):
        with pytest.raises(AttributeError, match=absent):
            getattr(modeling, absent)


@pytest.mark.skipif(not hasattr(PreTrainedModel, "is_custom_code"), reason="of newer versions of transformers")
def test_classes_of_ours_are_no_custom_code_and_those_derived_from_them_are():
    ours = type(patch_model(build("llama-2")))
    assert not ours.is_custom_code() and type("Derived", (ours,), {}).is_custom_code()


def test_the_class_of_a_patched_model_reads_its_base_without_a_warning(tmp_path, caplog, monkeypatch):
    """peft asks it for the vocabulary of the base whenever it saves an adapter; that of another family is warned of."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, "transformers")
    for variant in ("llama-2", "gpt2-2"):
        build(variant).save_pretrained(tmp_path / variant)
    patched = patch_model(AutoModelForCausalLM.from_pretrained(tmp_path / "llama-2")).config
    read = type(patched).from_pretrained(tmp_path / "llama-2")
    assert {**read.to_dict(), "_name_or_path": patched.name_or_path} == patched.to_dict()
    assert not caplog.messages
    type(patched).from_pretrained(tmp_path / "gpt2-2")
    assert "a model of type `gpt2`" in caplog.text


@pytest.mark.parametrize("variant", FAMILIES)
def test_a_grown_model_made_from_its_config_is_drawn_as_the_stock_one_is(variant):
    """GPT-2 draws the projections that end in the residual stream narrower than the others."""
    stock, config = build(variant), grown(variant).config
    made = AutoModelForCausalLM.from_config(config)
    for theirs, ours in zip(attentions(patch_model(AutoModelForCausalLM.from_config(stock.config))), attentions(made)):
        for role in ROLES:
            deviation = theirs.weight_of(role).std()
            # Thousands of draws: their deviation is within a tenth.
            assert (ours.weight_of(role).std() - deviation).abs() < 0.1 * deviation, role
        for weight in (
            weight
            for part in ours.growths.values()
            for weight in (part.in_projection.weight, part.out_projection.weight)
        ):
            assert weight.std().item() == pytest.approx(config.initializer_range, rel=0.2)
        assert not any(
            part.in_projection.bias.any() for part in ours.growths.values() if part.in_projection.bias is not None
        )


@pytest.mark.parametrize("variant", FAMILIES)
def test_a_grown_config_is_made_again_of_its_fields_and_of_its_file(variant, tmp_path):
    model = grown(variant)
    model.save_pretrained(tmp_path)
    again = type(model.config)(**model.config.to_diff_dict())
    assert again.to_dict() == model.config.to_dict() and again.extra_dims
    for _ in range(2):
        model.config.save_pretrained(tmp_path)
        assert type(again).from_pretrained(tmp_path).to_dict() == model.config.to_dict()


def test_copies_and_pickles_of_a_config_keep_class_and_fields():
    config = grown("llama-2").config
    for again in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert type(again) is type(config) and vars(again) == vars(config)
    assert copy.copy(config).extra_dims is config.extra_dims is not copy.deepcopy(config).extra_dims
    derived = type("Derived", (type(config),), {})(**config.to_diff_dict())
    assert type(copy.deepcopy(derived)) is type(derived)


KNOWN = """
import {imports}
size = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)
hf_growattn.patch_model(transformers.LlamaForCausalLM(transformers.LlamaConfig(**size)))
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as targets
assert targets["growattn_llama"] == targets["llama"]
assert peft.PeftType.GROWATTN in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING
assert {{"growattn_llama", "growattn_xlm-roberta"}} <= {{*transformers.CONFIG_MAPPING}}
assert {{*hf_growattn.__all__}} <= {{*dir(hf_growattn)}}
"""
PROCESSES = [
    KNOWN.format(imports="hf_growattn, transformers, peft"),
    KNOWN.format(imports="peft, transformers, hf_growattn"),
]


@pytest.mark.parametrize("script", PROCESSES, ids=["peft last", "peft first"])
def test_libraries_are_imported_in_any_order(script):
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
