"""Views agree with the models they look at."""

import pytest
import torch
from conftest import real_batches, real_model
from families import FAMILIES, LLAMA, VARIANTS, add_dims, build, tokens
from rebuilt import compute_logits, rebuild_output, window_of
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, BloomConfig, BloomModel, LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_growattn import patch_model
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import sync_config
from hf_growattn.measure import functional as F
from hf_growattn.measure.views import attention_views

# Each way to lay heads out and to place them, without sliding windows.
OTHERS = ["stablelm", "gpt-neox", "smollm3", "opt"]
EVERY = pytest.mark.parametrize("variant", [name for name in VARIANTS if name[:4] in ("llam", "gpt2")] + OTHERS)
GROWN = pytest.mark.parametrize("grown", [False, True], ids=["stock", "grown"])
# fp64: sums in another order, and nothing else.
EXACT = dict(rtol=1e-10, atol=1e-10)
# The model's cos and sin come from fp32 angles, whose differences are exact to about 1e-6 at these positions.
ROTATED = dict(rtol=1e-4, atol=1e-4)


def grow(model, layers=None, qk_dims=3, v_dims=5):
    """Patch a model and widen some layers, by default every second, by random, that is function-changing, weights."""
    for attention in attentions(patch_model(model))[slice(0, None, 2) if layers is None else layers]:
        part = add_dims(attention, qk_dims, v_dims)
        if part.in_proj.bias is not None:
            torch.nn.init.normal_(part.in_proj.bias, std=0.3)
    sync_config(model)
    return model


def built(variant, grown, dtype=torch.float64):
    model = build(variant, dtype=dtype)
    return grow(model) if grown else model


def recorded(model, **inputs):
    """What goes into and comes out of each self-attention module of a model, by layer."""
    views, seen = attention_views(model), {}

    def record(module, args, kwargs, output):
        seen[module] = (kwargs["hidden_states"] if "hidden_states" in kwargs else args[0], output[0])

    hooks = [view.module.register_forward_hook(record, with_kwargs=True) for view in views]
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return [(view, *seen[view.module]) for view in views]


# Patterns


@torch.no_grad()
@GROWN
@pytest.mark.parametrize("variant", [*EVERY.args[1], "cohere2", "granite-unscaled"])  # windows do not matter to logits
def test_patterns_give_the_logits_of_the_module(variant, grown, monkeypatch):
    """Those of the queries and keys that it hands to its attention function, at all offsets, negative ones too."""
    model, handed = built(variant, grown), {}
    original = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def record(module, query, key, *args, scaling=None, **kwargs):
        scale = module.head_dim**-0.5 if scaling is None else scaling
        handed[module] = scale * query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT
        return original(module, query, key, *args, scaling=scaling, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", record)
    for index, (view, x, _) in enumerate(recorded(model, input_ids=tokens(2, 9))):
        assert view.layer == index
        for head in range(view.heads):
            found = view.scaling * compute_logits(view, head, F.augment(x), causal=False)
            assert_close(found, handed[view.module][:, head], **(EXACT if "gpt2" in variant else ROTATED))


@pytest.mark.parametrize("variant", [name for name in VARIANTS if "gpt2" in name])
def test_without_rotation_the_offset_changes_nothing(variant):
    view = attention_views(built(variant, True))[0]
    assert_close(view.pattern(1, 5).dense(), view.pattern(1).dense(), rtol=0, atol=0)


@torch.no_grad()
def test_new_dims_do_not_rotate():
    model = grow(build("llama-2", dtype=torch.float64))
    view, layer = attention_views(model)[0], attentions(model)[0]
    for role in ("query", "key"):
        layer.weight_of(role)[:, :16] = 0
    assert view.pattern(0).dense().norm() > 1
    assert_close(view.pattern(0, 9).dense(), view.pattern(0).dense(), rtol=0, atol=0)


ROPE = {
    "linear": dict(rope_type="linear", rope_theta=1e4, factor=4.0),
    "dynamic": dict(rope_type="dynamic", rope_theta=1e4, factor=2.0),
    "yarn": dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=32),
    "llama3": dict(
        **dict(rope_type="llama3", rope_theta=1e4, factor=8.0, original_max_position_embeddings=32),
        **dict(low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    "longrope": dict(
        **dict(rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=32, factor=4.0),
        **dict(short_factor=[1.0] * 8, long_factor=[1.0 + i for i in range(8)]),
    ),
}


@pytest.mark.parametrize("length", [20, 80])
@pytest.mark.parametrize("rope_type", ROPE)
def test_scaled_rotations_are_the_models_own(rope_type, length):
    arguments = LLAMA | dict(num_hidden_layers=2, max_position_embeddings=64, rope_parameters=ROPE[rope_type])
    model = AutoModelForCausalLM.from_config(LlamaConfig(**arguments), attn_implementation="sdpa").double().eval()
    embedding = model.model.rotary_emb
    for view, x, output in recorded(grow(model), input_ids=tokens(1, length)):
        before = embedding.inv_freq.clone(), dict(vars(embedding))
        assert_close(rebuild_output(view, x), output, **ROTATED)
        view.pattern(0, 200)
        assert torch.equal(embedding.inv_freq, before[0]) and vars(embedding) == before[1]
    if rope_type in ("yarn", "longrope"):
        assert embedding.attention_scaling != 1


# The refactored attention


@GROWN
@EVERY
def test_refactored_attention_is_the_modules_output(variant, grown):
    model = built(variant, grown)
    assert {view.scaling for view in attention_views(model)} != {1.0}
    for view, x, output in recorded(model, input_ids=tokens(2, 11)):
        assert_close(rebuild_output(view, x), output, **(EXACT if "gpt2" in variant else ROTATED))


@pytest.mark.parametrize("variant", FAMILIES)
def test_refactored_attention_in_both_directions_and_under_a_mask(variant):
    model = built(variant, True)
    mask = torch.zeros(2, 1, 11, 11, dtype=torch.float64)
    mask[1, :, :, 3] = torch.finfo(torch.float64).min
    for view, x, causal in recorded(model, input_ids=tokens(2, 11)):
        arguments = {}
        if "llama" in variant:
            arguments["position_embeddings"] = model.model.rotary_emb(x, torch.arange(11)[None])
        with torch.no_grad():
            expected, _ = view.module(hidden_states=x, attention_mask=mask, **arguments)
        found = rebuild_output(view, x, causal=False, attention_mask=mask)
        assert_close(found, expected, **ROTATED)
        assert (found - causal).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", FAMILIES)
def test_views_compute_in_single_precision_at_least(variant, dtype):
    for view, x, output in recorded(built(variant, True, dtype), input_ids=tokens(2, 11)):
        assert view.pattern(0, 2).left.dtype == view.message(0).right.dtype == torch.float32
        found = rebuild_output(view, x)
        assert found.dtype == dtype
        scale = output.abs().max()
        # fp32 rounding; in bf16 the module rounds its own logits to 8 bits.
        assert (found - output).abs().max() < (1e-4 if dtype == torch.float32 else 0.1) * scale


@pytest.mark.parametrize("grown", [False, True], ids=["stock", "grown"])
@pytest.mark.parametrize("name", ["stories260K", "tinystories-3M-gpt2"])
def test_a_real_model(name, grown):
    model = real_model(name).double()
    batch = real_batches(1, size=2, tokens=32)[0] % model.config.vocab_size
    for view, x, output in recorded(grow(model) if grown else model, input_ids=batch):
        assert_close(rebuild_output(view, x), output, rtol=1e-4, atol=1e-5)  # as ROTATED
        pattern = view.pattern(0)
        width = pattern.left.shape[1]
        assert pattern.singular_values.shape == (width,)
        assert 1 < pattern.effective_rank < width


# The model stays as it is


@EVERY
def test_a_stock_model_is_untouched(variant):
    model = build(variant)
    everything = {name: (type(m), dict(vars(m))) for name, m in model.named_modules()}
    children = {name: dict(m._modules) for name, m in model.named_modules()}
    state, before = {k: v.clone() for k, v in model.state_dict().items()}, model(tokens()).logits
    for view in attention_views(model):
        view.pattern(0, 3), view.message(0), rebuild_output(view, torch.randn(1, 4, model.config.hidden_size))
    for name, module in model.named_modules():
        kind, attributes = everything[name]
        assert type(module) is kind and vars(module).keys() == attributes.keys()
        assert all(vars(module)[key] is value for key, value in attributes.items())
        assert module._modules == children[name]
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(model(tokens()).logits, before)


@pytest.mark.parametrize("variant", FAMILIES)
def test_views_follow_training_patching_and_growth(variant):
    model = build(variant, dtype=torch.float64)
    view = attention_views(model)[0]
    first = view.pattern(0), view.message(0)
    kept = [matrix.dense() for matrix in first]
    with torch.no_grad():
        for parameter in view.module.parameters():
            parameter.mul_(2)
    for matrix, now, before in zip(first, (view.pattern(0), view.message(0)), kept):
        assert_close(matrix.dense(), before, rtol=0, atol=0)
        assert_close(now.dense(), 4 * before)
    grow(model)
    assert view.pattern(0).left.shape[1] == 19 and view.message(0).left.shape[1] == 21
    _, x, output = recorded(model, input_ids=tokens(1, 9))[0]
    assert_close(rebuild_output(view, x), output, **ROTATED)


@GROWN
@pytest.mark.parametrize("variant", FAMILIES)
def test_bad_input_is_named(variant, grown):
    views = attention_views(built(variant, grown))
    with pytest.raises(IndexError, match=f"There are {len(views)} views, one of each layer.*got 99"):
        views[99]
    view = views[1]
    for head in (4, -1):
        for look in (view.pattern, view.message):
            with pytest.raises(IndexError, match=f"Layer 1 has 4 heads.*got head {head}"):
                look(head)


@pytest.mark.parametrize("variant", ["qwen3", "olmo2", "stablelm-norms"])
def test_normalized_queries_and_keys_have_no_pattern_but_messages(variant):
    view = attention_views(build(variant))[0]
    with pytest.raises(ValueError, match=r"Layer 0 normalizes its queries .* have no pattern"):
        view.pattern(0)
    assert view.message(0).shape[1] == view.module.config.hidden_size


@pytest.mark.parametrize("variant", ["mistral", "qwen2"])
def test_a_window_is_a_mask(variant):
    for view, *(inputs, expected) in recorded(build(variant, dtype=torch.float64), input_ids=tokens(2, 12)):
        width = window_of(view.attention)
        assert width in (None, 6)
        if width is None:
            assert_close(rebuild_output(view, inputs), expected, **ROTATED)
            continue
        mask = torch.full((1, 1, 12, 12), -torch.inf, dtype=torch.float64).tril(-6)
        assert_close(rebuild_output(view, inputs, attention_mask=mask), expected, **ROTATED)
        assert_close(rebuild_output(view, inputs[:, :6]), expected[:, :6], **ROTATED)


def test_unknown_and_partial_models_are_refused():
    stock = BloomModel(BloomConfig(vocab_size=9, hidden_size=8, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="no attention that could be viewed"):
        attention_views(stock)
    with pytest.raises(ValueError, match="has no rotary_emb"):
        attention_views(patch_model(build("llama-2")).model.layers[0])[0].pattern(0)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_a_sequence_is_as_long_for_a_query_before_its_key(rope_type):
    """Such a rotation chooses its frequencies by the largest position."""
    arguments = LLAMA | dict(num_hidden_layers=2, max_position_embeddings=64, rope_parameters=ROPE[rope_type])
    view = attention_views(AutoModelForCausalLM.from_config(LlamaConfig(**arguments)))[0]
    found, *others = (view.pattern(0, -200, length=length).dense() for length in (None, 201, 20))
    assert torch.equal(found, others[0]) and not torch.allclose(found, others[1], atol=1e-3)
