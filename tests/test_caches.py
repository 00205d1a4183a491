"""What the caches of grown models keep: as many numbers of a token as reports say, under any name of the argument."""

from inspect import signature

import pytest
import torch
from every_type import build as build_type
from families import build, build_encoder_decoder, tokens, wide
from peft import get_peft_model
from transformers import DynamicCache, LlamaForCausalLM, StaticCache

from hf_growattn import GrowAttnConfig, patch_model
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import cache_bytes
from hf_growattn.model.hooks import Call, common_width

CACHE = ("cache", "past_key_values")  # the output's name, the second before transformers 5.24
NAME = next(name for name in CACHE if name in signature(LlamaForCausalLM.forward).parameters)  # the argument's


def kept(outputs):
    """The cache that a model returns."""
    return next(outputs[name] for name in CACHE if name in outputs)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama-2", "gpt2-2", "deepseek_v3"])
@torch.no_grad()
def test_a_token_takes_the_bytes_that_reports_tell(name, attention):
    model = wide(build_type(name) if name == "deepseek_v3" else build(name), qk_dims=5, v_dims=2)
    model.set_attn_implementation(attention)
    layers = kept(model(tokens(1, 1), use_cache=True)).layers
    assert sum(layer.keys.nbytes + layer.values.nbytes for layer in layers) == cache_bytes(model)


def test_accelerators_get_multiples_of_eight():
    widths = [common_width(key, value, torch.device("cuda")) for key, value in ((70, 66), (64, 72), (65, 80))]
    assert widths == [72, 72, 80] and common_width(70, 66, torch.device("cpu")) == 70


@pytest.mark.parametrize("keyword", CACHE[CACHE.index(NAME) :])
@torch.no_grad()
def test_a_layer_takes_its_cache_by_either_name(keyword):
    """Forwards of transformers do, by a decorator, since there are two."""
    model = wide(build("llama-2"), qk_dims=3, v_dims=2)
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
    layer = attentions(wide(build("llama-2"), qk_dims=3, v_dims=1))[0]
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
    model = wide(build_encoder_decoder(), qk_dims, v_dims)
    model.set_attn_implementation(attention)
    source, target = tokens(), tokens(seed=4)
    full = model(source, decoder_input_ids=target).logits
    outputs = model(source, decoder_input_ids=target[:, :-1], use_cache=True)
    layer = kept(outputs).cross_attention_cache.layers[0]
    assert layer.keys.shape[-1] == 8 + max(qk_dims, v_dims * (attention == "sdpa"))
    name = next(name for name in CACHE if name in outputs)
    last = model(source, decoder_input_ids=target[:, -1:], use_cache=True, **{name: outputs[name]}).logits
    torch.testing.assert_close(last[:, 0], full[:, -1], rtol=1e-4, atol=1e-4)  # fp32, other orders of summation


@torch.no_grad()
def test_a_cache_of_other_dims_is_refused_until_it_is_empty():
    """Of before a growth, and of an adapter that is off; an early one takes its widths anew while it is empty."""
    base = patch_model(build("llama-2"))
    model = get_peft_model(base, GrowAttnConfig(qk_dims=3, v_dims=2)).eval()
    cache = DynamicCache()
    model(tokens(), **{NAME: cache})
    with (
        model.disable_adapter(),
        pytest.raises(ValueError, match=r"\(19, 19\) wide.*makes them \(16, 16\).*empty cache"),
    ):
        model(tokens(), **{NAME: cache})
    with model.disable_adapter():
        model(tokens(1, 1), **{NAME: (cache := DynamicCache())})
    with pytest.raises(ValueError, match=r"\(16, 16\) wide.*makes them \(19, 19\).*empty cache"):
        model(tokens(1, 1), **{NAME: cache})


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_static_caches_that_are_made_early(attention):
    """By the user, or by `generate` for a prefill in chunks."""
    model = wide(build("llama-2"), qk_dims=3, v_dims=2)
    model.set_attn_implementation(attention)
    cache = StaticCache(model.config, max_cache_len=16)
    cache.early_initialization(2, 2, 16, torch.float32, "cpu")
    given = dict(max_new_tokens=4, do_sample=False, eos_token_id=None)
    wanted = model.generate(tokens(2, 8), **given)
    assert torch.equal(model.generate(tokens(2, 8), **{NAME: cache}, **given), wanted)
    chunked = model.generate(tokens(2, 8), cache_implementation="static", prefill_chunk_size=3, **given)
    assert torch.equal(chunked, wanted)


@torch.no_grad()
def test_an_early_cache_in_an_export_names_the_way_around():
    """A traced program cannot make the cache anew."""
    model, ids = wide(build("llama-2"), qk_dims=3, v_dims=2), tokens(1, 4)
    cache = StaticCache(model.config, max_cache_len=16)
    cache.early_initialization(1, 2, 16, torch.float32, "cpu")

    class Decoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids):
            return self.model(ids, **{NAME: cache}).logits

    with pytest.raises(ValueError, match=r"For ExecuTorch, write a stock model with hf_growattn\.export_model"):
        torch.export.export(Decoder(), (ids,))
