"""What the caches of grown models keep: as many numbers of a token as reports say, under any name of the argument."""

import pytest
import torch
from every_type import build as build_type
from families import add_dims, build, build_encoder_decoder, tokens
from transformers import DynamicCache

from hf_growattn import patch_model
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import cache_bytes
from hf_growattn.model.hooks import Call, common_width

CACHE = ("cache", "past_key_values")  # the output's name, the second before transformers 5.24


def kept(outputs):
    """The cache that a model returns."""
    return next(outputs[name] for name in CACHE if name in outputs)


def widened(model, qk_dims: int, v_dims: int):
    patch_model(model)
    for attention in attentions(model):
        add_dims(attention, qk_dims, v_dims)
    return model


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama-2", "gpt2-2", "deepseek_v3"])
@torch.no_grad()
def test_a_token_takes_the_bytes_that_reports_tell(name, attention):
    model = widened(build_type(name) if name == "deepseek_v3" else build(name), qk_dims=5, v_dims=2)
    model.set_attn_implementation(attention)
    layers = kept(model(tokens(1, 1), use_cache=True)).layers
    assert sum(layer.keys.nbytes + layer.values.nbytes for layer in layers) == cache_bytes(model)


def test_accelerators_get_multiples_of_eight():
    widths = [common_width(key, value, torch.device("cuda")) for key, value in ((70, 66), (64, 72), (65, 80))]
    assert widths == [72, 72, 80] and common_width(70, 66, torch.device("cpu")) == 70


@pytest.mark.parametrize("keyword", CACHE)
@torch.no_grad()
def test_a_layer_takes_its_cache_by_either_name(keyword):
    """Forwards of transformers do, by a decorator."""
    model = widened(build("llama-2"), qk_dims=3, v_dims=2)
    layer, cache = attentions(model)[0], DynamicCache()
    for start in (0, 4):
        states = torch.randn(1, 4, 48)
        positions = model.model.rotary_emb(states, torch.arange(start, start + 4)[None])
        layer.module(states, position_embeddings=positions, **{keyword: cache})
    assert cache.layers[0].keys.shape == (1, 2, 8, layer.width_of("key"))


@pytest.mark.parametrize("one_width", [False, True])
@torch.no_grad()
def test_keys_that_a_forward_changes_after_the_cache_keep_their_new_dims(one_width):
    """As a norm behind the cache does."""
    layer = attentions(widened(build("llama-2"), qk_dims=3, v_dims=1))[0]
    call = Call(layer.module, [*layer.growths.values()], torch.randn(1, 5, 48), None)
    call.one_width = one_width
    key, value = torch.randn(2, 1, 2, 5, 16)
    _, new_key, new_value = call.project()
    shown, _ = call.store(DynamicCache(), key, value, 0)
    keys, values = call.join(2 * shown, new_key, value, new_value)
    assert torch.equal(keys, torch.cat((2 * key, new_key), -1))
    assert torch.equal(values[..., :17], torch.cat((value, new_value), -1))
    assert values.shape[-1] == (19 if one_width else 17) and not values[..., 17:].any()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("qk_dims, v_dims", [(4, 0), (0, 3)])
@torch.no_grad()
def test_cross_attention_reads_what_it_kept(qk_dims, v_dims, attention):
    """Of one kind alone, so that the keys or the values of a filled cache are as wide as those of the stock model."""
    model = widened(build_encoder_decoder(), qk_dims, v_dims)
    model.set_attn_implementation(attention)
    source, target = tokens(), tokens(seed=4)
    full = model(source, decoder_input_ids=target).logits
    outputs = model(source, decoder_input_ids=target[:, :-1], use_cache=True)
    layer = kept(outputs).cross_attention_cache.layers[0]
    assert layer.keys.shape[-1] == 8 + max(qk_dims, v_dims * (attention == "sdpa"))
    name = next(name for name in CACHE if name in outputs)
    last = model(source, decoder_input_ids=target[:, -1:], use_cache=True, **{name: outputs[name]}).logits
    torch.testing.assert_close(last[:, 0], full[:, -1], rtol=1e-4, atol=1e-4)  # fp32, other orders of summation
