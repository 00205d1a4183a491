"""A family of the user's own: it grows as it is, and a row tells what reads its old weights."""

import pytest
import torch
from families import LLAMA, lm_batches, tokens
from own_family import OwnAttention, OwnConfig, OwnForCausalLM
from transformers import AutoModelForCausalLM

from hf_growattn import AttentionLayout, Grower, GrowthConfig, attention_views, patch_model, register_architecture
from hf_growattn.growable.attention import attentions
from hf_growattn.model.families import REGISTERED

NAMES = dict.fromkeys(("query", "key", "value"), "mix") | {"output": "o_proj"}


@pytest.fixture
def registered():
    register_architecture("own", AttentionLayout(NAMES, grouped_by_head=True, rotate="turn"))
    yield
    del REGISTERED["own"]


def own_model():
    config = OwnConfig(**{**LLAMA, "num_hidden_layers": 2, "num_key_value_heads": 4}, attn_implementation="eager")
    return OwnForCausalLM(config).eval()


def test_an_unknown_family_grows_and_is_saved_and_loaded(tmp_path):
    model = own_model()
    before = model(tokens()).logits
    assert torch.equal(patch_model(model)(tokens()).logits, before)
    report = Grower(model, GrowthConfig(qk_dims=4, v_dims=2)).find(lm_batches()).keep()
    assert report.kept and all(layer.out_of_reach is None for layer in report.layers)
    assert [(a.width_of("query"), a.width_of("value")) for a in attentions(model)] == [(20, 18)] * 2
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert isinstance(attentions(reloaded)[1].module, OwnAttention)
    # The same weights through the same code: nothing but memory alignment differs.
    torch.testing.assert_close(reloaded(tokens()).logits, model(tokens()).logits, rtol=1e-6, atol=1e-6)


def test_new_keys_and_values_beside_unknown_weights_start_at_a_usual_size(no_step):
    model = patch_model(own_model())
    Grower(model, GrowthConfig(qk_dims=4, v_dims=2)).find(lm_batches(4)).keep()
    for attention in attentions(model):
        for role in ("key", "value"):
            sizes = attention.growths["growth_1"].weight_of(role).square().mean(-1).sqrt()
            torch.testing.assert_close(sizes, torch.full_like(sizes, 48**-0.5))  # for 48 features


@pytest.mark.parametrize("name", ["LayerNorm", "layer_norm"])
def test_attention_that_norms_its_own_output_is_refused(name):
    model = own_model()
    for layer in model.model.layers:
        setattr(layer.self_attn, name, torch.nn.LayerNorm(48))
    with pytest.raises(ValueError, match="normalizes its output together with the residual stream"):
        patch_model(model)


def test_a_layout_tells_what_old_dims_can_follow(registered):
    model = patch_model(own_model())
    report = Grower(model, GrowthConfig(qk_dims=4, v_dims=2)).find(lm_batches()).keep()
    assert report.kept and all(0 < layer.out_of_reach <= 1 for layer in report.layers if layer.kind == "v")
    assert all(layer.out_of_reach is None for layer in report.layers if layer.kind == "qk")  # they rotate
    attention = attentions(model)[1]
    mixed = attention.module.mix.weight.view(4, 3, 16, 48)
    assert all(torch.equal(attention.weight_of(role), mixed[:, i]) for i, role in enumerate(("query", "key", "value")))


def test_without_a_layout_views_say_how_to_give_one(registered):
    assert attention_views(patch_model(own_model()))[0].pattern(0).shape == (48, 48)
    layout = REGISTERED.pop("own")
    with pytest.raises(ValueError, match=r"query projection of layer 0 is not known.*register_architecture"):
        attention_views(patch_model(own_model()))[0].pattern(0)
    REGISTERED["own"] = layout


def test_a_layout_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="head is no role; roles are query, key, value and output"):
        register_architecture("own", AttentionLayout({"head": "mix"}))
    assert "own" not in REGISTERED


@pytest.mark.parametrize("name", ["num_heads", "head_dim", "v_head_dim"])
def test_heads_that_are_not_what_the_module_says_are_refused(name):
    model = own_model()
    for layer in model.model.layers:
        setattr(layer.self_attn, name, 2)
    with pytest.raises(ValueError, match=r"cannot join OwnAttention: it hands .* and its attributes say"):
        Grower(patch_model(model), GrowthConfig(qk_dims=2, v_dims=2)).find(lm_batches()).keep()
