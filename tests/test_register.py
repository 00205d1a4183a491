"""A family of the user's own: one row, and everything that holds for the others holds for it."""

from dataclasses import replace

import pytest
import torch
from families import LLAMA, build, lm_batches, tokens
from own_family import OwnAttention, OwnConfig, OwnForCausalLM
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_growattn import Architecture, Grower, GrowthConfig, patch_model, register_architecture
from hf_growattn.growable.models import attentions
from hf_growattn.model.architectures import ARCHITECTURES

ROW = Architecture(
    "own",
    "OwnAttention",
    modeling="own_family",
    query="mix",
    key="mix",
    value="mix",
    output="back",
    fused_groups=lambda config: config.num_attention_heads,
    key_value_heads=lambda config: config.num_attention_heads,
    rotate="turn",
    attention_dropout="drop",
    aliases=(("layer_idx", "layer"), ("head_dim", "width"), ("scaling", "scale")),
)


@pytest.fixture
def registered():
    register_architecture(ROW)
    yield
    del ARCHITECTURES["own"]


def own_model():
    config = OwnConfig(**{**LLAMA, "num_hidden_layers": 2, "num_key_value_heads": 4}, attn_implementation="eager")
    return OwnForCausalLM(config).eval()


def test_a_registered_family_grows_and_is_saved_and_loaded(registered, tmp_path):
    model = own_model()
    before = model(tokens()).logits
    assert torch.equal(patch_model(model)(tokens()).logits, before)
    assert Grower(model, GrowthConfig(qk_dims=4, v_dims=2)).grow(lm_batches()).applied
    assert [(a.width_of("query"), a.width_of("value")) for a in attentions(model)] == [(20, 18)] * 2
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert isinstance(attentions(reloaded)[1], OwnAttention)
    # The same weights through the same code: nothing but memory alignment differs.
    torch.testing.assert_close(reloaded(tokens()).logits, model(tokens()).logits, rtol=1e-6, atol=1e-6)
    assert not list(tmp_path.rglob("*.py"))  # its row is not in the files that travel


def test_before_it_is_registered_the_message_says_how():
    with pytest.raises(ValueError, match=r"'own'.*register_architecture"):
        patch_model(own_model())


@pytest.mark.parametrize(
    "row, match",
    [
        (ARCHITECTURES["llama"], "has a row already"),
        (replace(ROW, model_type="unheard-of"), "AutoConfig does not know 'unheard-of'"),
        (replace(ROW, attention="Attention"), "own_family has no Attention"),
        (replace(ROW, rotate="rotate"), "own_family has no rotate"),
    ],
)
def test_rows_that_cannot_be_are_refused(row, match):
    known = dict(ARCHITECTURES)
    with pytest.raises(ValueError, match=match):
        register_architecture(row)
    assert known == ARCHITECTURES


def test_families_that_cannot_grow_say_why():
    config = LlamaConfig(**LLAMA)
    for model_type, reason in (("bloom", "ALiBi"), ("gpt_oss", "sink"), ("deepseek_v3", "latent")):
        model = build("llama-2")
        model.config = config
        config.model_type = model_type
        with pytest.raises(ValueError, match=reason):
            patch_model(model)
