"""Views agree with the models they look at."""

import pytest
import torch
from conftest import real_batches, real_model
from families import FAMILIES, LLAMA, VARIANTS, build, tokens
from rebuilt import rebuild_output, window_of
from torch.testing import assert_close
from transformers import AlbertConfig, AlbertModel, AutoModelForCausalLM, LlamaConfig

from hf_growattn import patch_model
from hf_growattn.growable.models import attentions
from hf_growattn.measure.views import attention_views

ROLES = ("query", "key", "value", "output")
# Each way to lay heads out and to place them, without sliding windows.
OTHERS = ["stablelm", "gpt-neox", "smollm3", "opt", "falcon"]
EVERY = pytest.mark.parametrize("variant", [name for name in VARIANTS if name[:4] in ("llam", "gpt2")] + OTHERS)
GROWN = pytest.mark.parametrize("grown", [False, True], ids=["stock", "grown"])
# fp64: sums in another order, and nothing else.
EXACT = dict(rtol=1e-10, atol=1e-10)
# The model's cos and sin come from fp32 angles, whose differences are exact to about 1e-6 at these positions.
ROTATED = dict(rtol=1e-4, atol=1e-4)


def grow(model, layers=None, qk_dims=3, v_dims=5):
    """Patch a model and widen some layers, by default every second, by random, that is function-changing, weights."""
    for layer in attentions(patch_model(model))[slice(0, None, 2) if layers is None else layers]:
        layer.widen(qk_dims, v_dims)
        for role in ROLES:
            old = layer.width_of(role) - (qk_dims if role in ("query", "key") else v_dims)
            torch.nn.init.normal_(layer.weight_of(role)[:, old:], std=0.3)
            if layer.bias_of(role) is not None:
                torch.nn.init.normal_(layer.bias_of(role)[:, old:], std=0.3)
    model.sync_config()
    return model


def built(variant, grown, dtype=torch.float64):
    model = build(variant, dtype=dtype)
    return grow(model) if grown else model


def growable(variant, grown):
    """The growable modules of a patched model with the weights of `built`: where tests take q, k and v from."""
    torch.manual_seed(0)
    return attentions(built(variant, grown) if grown else patch_model(build(variant, dtype=torch.float64)))


def pair(variant, grown):
    """Views on a model, and growable modules with the same weights from another copy of it."""
    torch.manual_seed(0)
    return attention_views(built(variant, grown)), growable(variant, grown)


def features(hidden_states, rows):
    ones = torch.ones(*hidden_states.shape[:-1], rows - hidden_states.shape[-1]).to(hidden_states)
    return torch.cat((hidden_states, ones), dim=-1)


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


def rotary(variant, positions):
    """`cos, sin` of a stock model, each (positions, 1, rotated dims)."""
    embedding = build(variant, dtype=torch.float64).model.rotary_emb
    return embedding(torch.zeros(1, dtype=torch.float64), torch.tensor(positions)[:, None])


# Patterns


@GROWN
@EVERY
def test_pattern_gives_the_logits_of_the_projections(variant, grown):
    views, layers = pair(variant, grown)
    assert [view.layer_idx for view in views] == list(range(len(layers)))
    for view, layer in zip(views, layers):
        x = torch.randn(2, 6, layer.config.hidden_size, dtype=torch.float64)
        query, key, _ = layer._project(x)
        assert (view.heads, view.groups, view.scaling) == (query.shape[1], key.shape[1], layer.scaling)
        for head in range(view.heads):
            pattern = view.pattern(head)
            assert pattern.shape == (x.shape[-1] + (layer.bias_of("query") is not None),) * 2
            assert pattern.left.shape[1] == layer.width_of("query")
            inputs = features(x, pattern.shape[0])
            shared = key[:, head * view.groups // view.heads]
            assert_close(inputs @ pattern.left @ (inputs @ pattern.right).mT, query[:, head] @ shared.mT, **EXACT)


@pytest.mark.parametrize("offset", [0, 1, 7, 60, -4])
@GROWN
@pytest.mark.parametrize("variant", [name for name in VARIANTS if "llama" in name])
def test_rotated_pattern_gives_the_rotated_logits(variant, grown, offset):
    views, layers = pair(variant, grown)
    rotations = {at: rotary(variant, [at]) for at in (0, 30, offset, 30 + offset, -offset)}
    for view, layer in zip(views, layers):
        x = torch.randn(2, 6, layer.config.hidden_size, dtype=torch.float64)
        query, key, _ = layer._project(x)
        turned = {at: layer._rotate_old_dims(query, key, *rotation) for at, rotation in rotations.items()}
        for head in range(view.heads):
            pattern = view.pattern(head, offset)
            inputs, shared = features(x, pattern.shape[0]), head * view.groups // view.heads

            def logits(at_query, at_key, head=head, shared=shared, turned=turned):
                return turned[at_query][0][:, head] @ turned[at_key][1][:, shared].mT

            found = inputs @ pattern.left @ (inputs @ pattern.right).mT
            assert_close(found, logits(offset, 0), **EXACT)
            assert_close(found, logits(30 + offset, 30), **ROTATED)
            if offset:
                assert (found - logits(-offset, 0)).abs().max() > 0.1


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


# Messages


@GROWN
@EVERY
def test_message_is_the_heads_share_of_the_output(variant, grown):
    views, layers = pair(variant, grown)
    for view, layer in zip(views, layers):
        x = torch.randn(2, 6, layer.config.hidden_size, dtype=torch.float64)
        value = layer._project(x)[2]
        bias = layer.projection_of("output").bias
        total = torch.zeros_like(x)
        for head in range(view.heads):
            message = view.message(head)
            assert message.shape == (x.shape[-1] + (layer.bias_of("value") is not None), x.shape[-1])
            assert message.left.shape[1] == layer.width_of("value")
            # The output projection applied to this head's values alone.
            alone = torch.zeros(*x.shape[:2], view.heads, layer.width_of("value"), dtype=torch.float64)
            alone[:, :, head] = value[:, head * view.groups // view.heads]
            expected = layer.projection_of("output")(alone.flatten(2)) - (0 if bias is None else bias)
            assert_close(features(x, message.shape[0]) @ message.left @ message.right.T, expected, **EXACT)
            total = total + expected
        assert total.abs().max() > 0.1


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


def test_cross_attention_has_no_view():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=97, add_cross_attention=True))
    assert [view.layer_idx for view in attention_views(model)] == [0, 1]
    assert not any(view.module.is_cross_attention for view in attention_views(model))


@GROWN
@pytest.mark.parametrize("variant", FAMILIES)
def test_bad_input_is_named(variant, grown):
    view = attention_views(built(variant, grown))[1]
    for head in (4, -1):
        for look in (view.pattern, view.message):
            with pytest.raises(IndexError, match=f"Layer 1 has 4 heads.*got head {head}"):
                look(head)


@pytest.mark.parametrize("variant", ["qwen3", "olmo2", "stablelm-norms"])
def test_normalised_queries_and_keys_have_no_pattern_but_messages(variant):
    view = attention_views(build(variant))[0]
    with pytest.raises(ValueError, match=r"Layer 0 normalises its queries .* have no pattern"):
        view.pattern(0)
    assert view.message(0).shape[1] == view.module.config.hidden_size


@pytest.mark.parametrize("variant", ["mistral", "qwen2", "gpt-neo"])
def test_a_window_is_a_mask(variant):
    for view, *(inputs, expected) in recorded(build(variant, dtype=torch.float64), input_ids=tokens(2, 12)):
        width = window_of(view._attention)
        assert width in (None, 6)
        if width is None:
            assert_close(rebuild_output(view, inputs), expected, **ROTATED)
            continue
        mask = torch.full((1, 1, 12, 12), -torch.inf, dtype=torch.float64).tril(-6)
        assert_close(rebuild_output(view, inputs, attention_mask=mask), expected, **ROTATED)
        assert_close(rebuild_output(view, inputs[:, :6]), expected[:, :6], **ROTATED)


def test_unknown_and_partial_models_are_refused():
    albert = AlbertModel(AlbertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(ValueError, match=r"'albert': it .*Known types: .*llama"):
        attention_views(albert)
    with pytest.raises(ValueError, match="has no rotary_emb"):
        attention_views(patch_model(build("llama-2")).model.layers[0])
