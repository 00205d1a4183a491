"""What of peft growth refuses: an error that names the fix, and the model exactly as it was."""

import pytest
import torch
from families import build
from test_growth import fingerprint, same
from test_peft import BATCHES, GPT2, GROWTH, LLAMA, adapted, lora, peft, pytestmark  # noqa: F401  the mark counts here too

from hf_growattn import Grower, GrowthConfig, patch_model
from hf_growattn.growable.models import attentions

REFUSED = {
    "DoRA": (lambda: lora(LLAMA, use_dora=True), r"variant of LoRA \(DoraLinearVariant\).*merge_and_unload"),
    "LoHa": (lambda: peft.LoHaConfig(r=4, target_modules=["k_proj"]), r"k_proj of layer 0.*loha.*merge_and_unload"),
    "VeRA": (lambda: peft.VeraConfig(r=4, target_modules=["q_proj"]), r"vera.*merge_and_unload"),
    "AdaLoRA": (lambda: peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10), r"adalora.*merge_and_unload"),
    "IA3": (lambda: peft.IA3Config(), r"ia3.*merge_and_unload"),
    "copies": (lambda: lora(LLAMA, modules_to_save=["k_proj"]), "a ModulesToSaveWrapper.*merge_and_unload"),
    "elsewhere": (lambda: lora(LLAMA, ["gate_proj"]), "q_proj.weight of layer 0 is frozen.*let LoRA target it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_adapters_are_refused(case):
    config, match = REFUSED[case]
    model = peft.get_peft_model(patch_model(build(LLAMA)), config())
    refused(model, GROWTH, match)


@pytest.mark.parametrize("setting", [dict(update_existing=True), dict(method="refactor")])
def test_adapters_keep_the_weights_they_were_trained_for(setting):
    refused(adapted(GPT2), GrowthConfig(qk_dims=2, **setting), "rewrites existing weights.*merge_and_unload")


def test_quantized_bases_are_refused():
    model = adapted(LLAMA)
    inside = attentions(model)[0].q_proj.base_layer
    inside.weight = torch.nn.Parameter(inside.weight.to(torch.int8), requires_grad=False)
    refused(model, GROWTH, "q_proj of layer 0 is in torch.int8, quantized. Load the model without quantization")


def test_prompts_are_refused():
    model = patch_model(build(LLAMA))
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(ValueError, match=r"\(PromptTuningConfig\) adds prompts.*before get_peft_model"):
        Grower(peft.get_peft_model(model, config), GROWTH)


def refused(model, config, match):
    before = fingerprint(model.get_base_model())
    with pytest.raises(ValueError, match=match):
        Grower(model, config).grow(BATCHES)
    assert same(fingerprint(model.get_base_model()), before)
