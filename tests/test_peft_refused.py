"""What of peft growth refuses: an error that names the fix, and the model exactly as it was."""

import pytest
from families import build
from test_growth import fingerprint, same
from test_peft import BATCHES, GPT2, GROWTH, LLAMA, adapted, peft, pytestmark  # noqa: F401  the mark counts here too

from hf_growattn import Grower, GrowthConfig, patch_model


@pytest.mark.parametrize("setting", [dict(update_existing=True), dict(method="refactor")])
def test_adapters_keep_the_weights_they_were_trained_for(setting):
    model = adapted(GPT2)
    before = fingerprint(model.get_base_model())
    with pytest.raises(ValueError, match="merge_and_unload"):
        Grower(model, GrowthConfig(qk_dims=2, **setting)).find(BATCHES).keep()
    assert same(fingerprint(model.get_base_model()), before)


def test_prompts_are_refused():
    model = patch_model(build(LLAMA))
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(ValueError, match=r"\(PromptTuningConfig\) adds prompts.*Use LoRA"):
        Grower(peft.get_peft_model(model, config), GROWTH)
