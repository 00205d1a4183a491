"""What `trim_model` refuses: an error that names the fix, and the model exactly as it was."""

import pytest
import torch
from families import build, lm_batches, tokens
from test_growth import fingerprint, same
from test_trim import grown, kill_some

from hf_growattn import patch_model, trim_model


def refused(model, match, *args, **kwargs):
    before = fingerprint(model)
    with pytest.raises(ValueError, match=match):
        trim_model(model, *args, **kwargs)
    assert same(fingerprint(model), before)


@pytest.mark.parametrize("bound", [-0.1, float("nan"), float("inf"), "0.1", None])
def test_a_bound_out_of_range_is_refused(bound):
    refused(grown("llama-2"), "at least 0, such as 0.001", lm_batches(), bound)


def test_wrong_input_is_refused():
    with pytest.raises(ValueError, match="call patch_model"):
        trim_model(build("llama-2"))
    model = grown("llama-2")
    refused(model, "no batches", [])
    refused(model, "Batch 0 is a str", ["text"])
    refused(model, "no loss for batch 0.*labels", [{"input_ids": tokens()}])
    refused(model, "none of this model's parameters", optimizer=torch.optim.AdamW(build("llama-2").parameters()))
    with torch.inference_mode():
        refused(model, "inference_mode")


def test_a_model_that_has_not_grown_is_left_alone():
    model = patch_model(build("llama-2"))
    before = fingerprint(model)
    report = trim_model(model, lm_batches())
    assert report.layers == [] and "no layer has grown" in str(report)
    assert same(fingerprint(model), before)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_stay_what_they_are():
    peft = pytest.importorskip("peft")
    model = grown("llama-2")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    kill_some(model)
    before, lora = wrapped(tokens()).logits, {n: p for n, p in model.named_parameters() if "lora" in n}
    assert trim_model(wrapped).removed_parameters
    torch.testing.assert_close(wrapped(tokens()).logits, before, rtol=0, atol=1e-5 * before.abs().max().item())
    assert all(p is lora[n] for n, p in model.named_parameters() if "lora" in n)
