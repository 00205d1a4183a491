"""Types beyond the table of families: sinks, gates, partial rotation, layers without attention, a model inside another.

Their own forward runs as it is, so they need no line of ours.
"""

import pytest
import torch
import transformers
from encoders import ENCODERS
from encoders import build as build_encoder
from families import COMMON, GROUPED, HEADS_OF_16, VOCABULARY, add_dims, build, lm_batches, tokens
from transformers import AutoConfig, AutoModelForCausalLM

from hf_growattn import Grower, GrowthConfig, load_growth, patch_model, save_growth
from hf_growattn.growable.growths import attentions, sync_config

SIZES = COMMON | GROUPED | dict(head_dim=16, num_hidden_layers=2)
EXPERTS = dict(num_experts_per_tok=2, num_local_experts=4, num_experts=4, moe_intermediate_size=32)
LINEAR = dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16)
TYPES = {
    "gpt_oss": EXPERTS,  # a sink in each head's softmax
    "glm4": {},
    "olmo3": {},
    "qwen3_next": dict(num_hidden_layers=4, shared_expert_intermediate_size=32, **EXPERTS, **LINEAR),  # a hybrid
    "qwen3_5_text": dict(num_hidden_layers=4, **LINEAR),
    "ministral3": {},
}


def build_type(model_type: str):
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES | TYPES[model_type])).eval()


def build_llava():
    """A language model inside another, next to one that sees."""
    text = dict(model_type="llama", **SIZES)
    vision = dict(model_type="clip_vision_model", image_size=16, patch_size=8, num_hidden_layers=2, **HEADS_OF_16)
    torch.manual_seed(7)
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=VOCABULARY - 1)
    return transformers.LlavaForConditionalGeneration(config).eval()


@torch.no_grad()
@pytest.mark.parametrize("name", [*TYPES, "llava"])
def test_it_grows_and_is_saved_and_loaded(name, tmp_path):
    model = build_llava() if name == "llava" else build_type(name)
    before = model(tokens()).logits
    assert torch.equal(patch_model(model)(tokens()).logits, before)
    layers = [attention.layer for attention in attentions(model) if "vision" not in type(attention).__name__.lower()]
    report = Grower(model, GrowthConfig(qk_dims=2, v_dims=3, layers=layers[-1:])).grow(lm_batches(4))
    assert report.applied and report.loss_after < report.loss_before
    expected = model(tokens()).logits
    assert not torch.equal(expected, before)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(tokens()).logits, expected)
    drafted = model.generate(tokens(), max_new_tokens=6, do_sample=False)
    assert torch.equal(drafted, model.generate(tokens(), max_new_tokens=6, do_sample=False, use_cache=False))


def grown(name: str):
    model = patch_model(build_llava() if name == "llava" else build_encoder(name) if name in ENCODERS else build(name))
    for attention in attentions(model):
        add_dims(attention, 3, 2)
    sync_config(model)
    return model


@pytest.mark.parametrize("name", ["bert", "vit", "llava"])
def test_a_stock_class_refuses_a_grown_checkpoint(name, tmp_path):
    """It would leave the new dims out otherwise, with no more than a warning."""
    model = grown(name)
    model.save_pretrained(tmp_path)
    with pytest.raises(Exception, match=r"per_layer_config|num_hidden_layers|hidden_size|head_dim"):
        type(model).__bases__[1].from_pretrained(tmp_path)


def test_a_growth_is_saved_and_loaded_alone(tmp_path):
    model, fresh = grown("llama-5-bias"), patch_model(build("llama-5-bias"))
    save_growth(model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"growth.safetensors", "growth.json"}
    load_growth(fresh, tmp_path)
    assert torch.equal(fresh(tokens()).logits, model(tokens()).logits)
    assert fresh.config.extra_dims == model.config.extra_dims
    with pytest.raises(ValueError, match=r"growth of a growattn_llama, and this is a growattn_gpt2"):
        load_growth(patch_model(build("gpt2-2")), tmp_path)
    with pytest.raises(ValueError, match="has not grown"):
        save_growth(patch_model(build("llama-2")), tmp_path)
