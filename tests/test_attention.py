"""The forward of grown layers under every way that transformers calls it."""

import peft
import pytest
import torch
from conftest import LONG
from families import FAMILIES, add_dims, build, build_encoder_decoder, lm_batches, padded, tokens, wide
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    CompileConfig,
    GenerationConfig,
)
from transformers.generation import ContinuousBatchingConfig
from transformers.masking_utils import sdpa_mask
from transformers.models.llama.modeling_llama import LlamaAttention

from hf_growattn import GrowAttnConfig, Grower, GrowthConfig, patch_model
from hf_growattn.growable.attention import attentions
from hf_growattn.model.new_dims import InProjection


def widened(variant: str, qk_dims: int = 6, v_dims: int = 0, attention: str = "sdpa"):
    return wide(build(variant, attention=attention), qk_dims, v_dims)


WIDTHS = pytest.mark.parametrize("qk_dims, v_dims", [(6, 0), (0, 5), (7, 3), (3, 9)])
COMPILED = pytest.mark.parametrize("variant", ["llama-2", "gpt2-2"])  # each layer of more would take seconds


def assert_agrees_with_eager(model, attention, batch):
    model.set_attn_implementation("eager")
    kept = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    eager = model(**batch).logits
    model.set_attn_implementation(attention)
    # fp32, other orders of summation.
    torch.testing.assert_close(model(**batch).logits[kept], eager[kept], rtol=1e-4, atol=1e-4)


@WIDTHS
@pytest.mark.parametrize("variant", FAMILIES)
@torch.no_grad()
def test_sdpa_agrees_at_unequal_widths(variant, qk_dims, v_dims):
    model = widened(variant, qk_dims, v_dims)
    for batch in ({"input_ids": tokens()}, padded(), padded(left=False)):
        assert_agrees_with_eager(model, "sdpa", batch)


@pytest.mark.parametrize("qk_dims, v_dims", [(7, 3), (3, 9)] if LONG else [(7, 3)])  # compiling one takes 30 s
@torch.no_grad()  # torch has no backward of flex attention on a CPU
def test_flex_attention_agrees_at_unequal_widths(qk_dims, v_dims):
    """Wider on either side: transformers compiles a kernel for each pair of widths and each kind of mask."""
    assert_agrees_with_eager(widened("llama-2", qk_dims, v_dims), "flex_attention", padded())


@pytest.mark.parametrize("qk_dims, v_dims", [(7, 3), (3, 9)])
@pytest.mark.parametrize("variant", FAMILIES)
def test_flash_like_kernels_get_equal_widths(variant, qk_dims, v_dims):
    """Flash kernels cut values wider than keys, so they must never see unequal widths."""
    seen = []

    def recording(module, query, key, value, attention_mask, **kwargs):
        seen.append((query.shape[-1], key.shape[-1], value.shape[-1], kwargs["scaling"]))
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("recording", recording)
    AttentionMaskInterface.register("recording", sdpa_mask)
    model = widened(variant, qk_dims, v_dims)
    expected = model(**padded()).logits
    model.set_attn_implementation("recording")
    torch.testing.assert_close(model(**padded()).logits, expected, rtol=0, atol=0)
    assert all(q == k == v for q, k, v, _ in seen)
    assert seen[0][0] == 16 + max(qk_dims, v_dims)
    assert all(scaling == 16**-0.5 for *_, scaling in seen)


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 3}, {"cache_implementation": "static"}])
@pytest.mark.parametrize("variant", FAMILIES)
def test_generation_modes(variant, options):
    model = widened(variant, 7, 3)
    batch = padded()

    def generate(**more):
        torch.manual_seed(5)
        return model.generate(**batch, max_new_tokens=10, **options, **more)

    out = generate()
    assert out.shape == (3, 27) and torch.equal(out[:, :17], batch["input_ids"])
    if "cache_implementation" not in options:
        assert torch.equal(out, generate(use_cache=False))
    else:
        assert torch.equal(out, model.generate(**batch, max_new_tokens=10))


@pytest.mark.parametrize("variant", ["mistral", "qwen2", "phi3", "gemma3"])
def test_static_caches_beyond_the_sliding_window(variant):
    model = widened(variant, 4, 2)
    options = dict(max_new_tokens=10, do_sample=False, attention_mask=torch.ones_like(tokens()))
    assert torch.equal(
        model.generate(tokens(), cache_implementation="static", **options), model.generate(tokens(), **options)
    )


@pytest.mark.parametrize("variant, backend", [("llama-2", "inductor"), ("gpt2-2", "inductor" if LONG else "aot_eager")])
def test_compiled_decoding(variant, backend):
    model = widened(variant, 4, 2)
    expected = model.generate(tokens(), max_new_tokens=6, do_sample=False)
    compiled = CompileConfig(fullgraph=True, mode="default" if backend == "inductor" else None, backend=backend)
    compiled._compile_all_devices = True  # transformers compiles decoding on accelerators only, unless asked
    out = model.generate(
        tokens(), max_new_tokens=6, do_sample=False, cache_implementation="static", compile_config=compiled
    )
    assert torch.equal(out, expected)
    torch._dynamo.reset()


@COMPILED
def test_compiles_to_one_graph(variant):
    model = widened(variant, 4, 2)
    batch = padded()
    compiled = torch.compile(model, fullgraph=True, backend="eager")  # decoding, above, generates code
    for options in ({}, {"use_cache": False}):  # the cache of the default call copies the config in the graph
        expected = model(**batch, **options).logits
        torch.testing.assert_close(compiled(**batch, **options).logits, expected, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()


@pytest.mark.parametrize("strict", [False, True])
@COMPILED
@torch.no_grad()
def test_exports_to_one_graph(variant, strict):
    model = widened(variant, 4, 2)
    exported = torch.export.export(model, (), {"input_ids": tokens(), "use_cache": False}, strict=strict)
    torch.testing.assert_close(exported.module()(input_ids=tokens(), use_cache=False).logits, model(tokens()).logits)


def test_cross_attention_projects_each_of_two_inputs_by_its_part():
    shape = attentions(patch_model(build_encoder_decoder()))[0].shape
    projection = InProjection(shape, 3, 2)
    for parameter in projection.parameters():
        torch.nn.init.normal_(parameter)
    own, source = torch.randn(2, 1, 5, shape.in_features)
    for found, expected in zip(projection(own, source), [projection(own)[0], *projection(source)[1:]]):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("variant", FAMILIES)
def test_output_attentions_and_hidden_states(variant):
    options = dict(output_attentions=True, output_hidden_states=True)
    stock = build(variant, attention="eager")
    expected = stock(tokens(), **options)
    patched = patch_model(build(variant, attention="eager"))(tokens(), **options)
    for name in ("attentions", "hidden_states"):
        assert len(patched[name]) == len(expected[name])
        assert all(torch.equal(a, b) for a, b in zip(patched[name], expected[name]))
    grown = widened(variant, attention="eager")(tokens(), output_attentions=True)
    assert len(grown.attentions) == stock.config.num_hidden_layers
    torch.testing.assert_close(grown.attentions[0].sum(-1), torch.ones(3, stock.config.num_attention_heads, 17))


def test_a_forward_of_others_around_the_stock_one_stays_and_grows():
    class Doubled(LlamaAttention):
        def forward(self, *args, **kwargs):
            out, weights = super().forward(*args, **kwargs)
            return 2 * out, weights

    model = build("llama-2")
    model.model.layers[1].self_attn.__class__ = Doubled
    before = model(tokens()).logits
    layers = attentions(patch_model(model))
    add_dims(layers[1], v_dims=3, roles=("value",))
    assert len(layers) == 2 and torch.equal(model(tokens()).logits, before)
    assert Grower(model, GrowthConfig(qk_dims=2, layers=[1])).find(lm_batches()).keep().kept
    assert type(layers[1].module) is Doubled


@pytest.mark.parametrize("dims", [(4, 0), (0, 4)])
def test_vllm_refuses_wider_heads(dims):
    model = widened("llama-2", *dims)
    hidden_states = torch.zeros(1, 3, model.config.hidden_size)
    positions = model.model.rotary_emb(hidden_states, torch.arange(3)[None])
    model.config._attn_implementation = "vllm"
    with pytest.raises(ValueError, match=r"vLLM keeps keys and values of one width.*export_model"):
        attentions(model)[0].module(hidden_states, position_embeddings=positions)


@pytest.mark.parametrize("variant", ["llama-2", "gpt2-2"])
def test_continuous_batching_takes_no_grown_model(variant):
    model, prompts = build(variant), [[5, 6, 7, 8], [9, 10, 11]]
    options = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    size = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)  # else all of the memory

    def batched():
        found = model.generate_batch(prompts, options, size, progress_bar=False)
        return sorted(output.generated_tokens for output in found.values())

    expected = batched()
    patch_model(model)
    assert batched() == expected and all(len(generated) == 6 for generated in expected)
    add_dims(attentions(model)[0], qk_dims=4)
    adapted = peft.get_peft_model(build(variant), GrowAttnConfig(qk_dims=2)).get_base_model()
    # A thread of it would only log the error.
    for begin in (batched, model.init_continuous_batching, adapted.init_continuous_batching):
        with pytest.raises(ValueError, match=r"Continuous batching keeps.*Use model\.generate instead"):
            begin()
