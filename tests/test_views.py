"""Views agree with the models they look at, and a factored matrix with the matrix it stands for."""

import encoders
import modalities
import peft
import pytest
import torch
from families import FAMILIES, LLAMA, VARIANTS, add_dims, build, tokens, wide
from hypothesis import given, settings
from hypothesis import strategies as st
from rebuilt import rebuild_output
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, BloomConfig, BloomModel, LlamaConfig

from hf_growattn import patch_model
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import sync_config
from hf_growattn.growable.projections import answers
from hf_growattn.measure.views import FactoredMatrix, attention_views

# Each way to lay heads out and to place them, without sliding windows.
OTHERS = ["stablelm", "gpt-neox", "smollm3", "opt", "granite-unscaled"]
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
        if part.in_projection.bias is not None:
            torch.nn.init.normal_(part.in_projection.bias, std=0.3)
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


@GROWN
@EVERY
def test_refactored_attention_is_the_modules_output(variant, grown):
    model = built(variant, grown)
    for index, (view, x, output) in enumerate(recorded(model, input_ids=tokens(2, 11))):
        assert view.layer == index
        assert_close(rebuild_output(view, x), output, **(EXACT if "gpt2" in variant else ROTATED))


@GROWN
@pytest.mark.parametrize("name", encoders.ENCODERS)
def test_views_of_encoders_compute_what_the_module_does(name, grown):
    model = encoders.build(name, "eager")
    views, seen = attention_views(wide(model, 3, 2) if grown else model), {}
    view = views[1]

    def before(_, args, kwargs):
        seen["x"] = args[0] if args else kwargs["hidden_states"]
        seen["mask"] = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)

    view.module.register_forward_pre_hook(before, with_kwargs=True)
    for written in (
        view.attention.projection_of("output"),
        *(d.out_projection for d in view.attention.growths.values()),
    ):
        written.register_forward_hook(lambda *call: seen.update(out=seen.get("out", 0) + call[-1]))
    with torch.no_grad():
        model(**encoders.inputs(name))
    found = rebuild_output(view, seen["x"], causal=False, attention_mask=seen["mask"])
    assert_close(found, seen["out"], rtol=1e-4, atol=1e-4)  # fp32, other orders of summation


@torch.no_grad()
def test_old_logits_of_t5_are_not_scaled_and_new_ones_are():
    model = wide(modalities.build("t5").double(), 2, 1, roles=("query", "key"), std=0.1)
    view = attention_views(model)[0]
    model.set_attn_implementation("eager")
    x = torch.randn(1, 5, 64, dtype=torch.float64)
    (weights,) = (o for o in view.module(x)[1:] if (o is not None) and o[0, 0].sum(-1).allclose(o.new_ones(5)))
    logits = view.scaling * (x[0] @ view.pattern(0).dense() @ x[0].T)
    found = torch.softmax(logits + view.module.compute_bias(5, 5)[0, 0], -1)
    assert_close(found, weights[0, 0], rtol=1e-6, atol=1e-8)


@torch.no_grad()
def test_merged_adapters_count_once():
    model = patch_model(build("llama-2"))
    options = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted, attention = peft.get_peft_model(model, options), attentions(model)[0]
    plain, expected = (attention.factors_of("query", torch.float64, adapters=on) for on in (False, True))
    assert (expected - plain).abs().max() > 0.01
    adapted.merge_adapter()
    assert_close(attention.factors_of("query", torch.float64), expected, rtol=0, atol=1e-6)


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


def test_a_fused_projection_holds_all_queries_before_keys_and_values():
    attention = attentions(patch_model(build("phi3")))[0]
    sizes = [attention.shape.heads_of(role) * attention.width_of(role) for role in ("query", "key", "value")]
    assert sizes[0] != sizes[1]  # queries share keys
    for role, rows in zip(("query", "key", "value"), attention.module.qkv_proj.weight.split(sizes)):
        assert torch.equal(attention.weight_of(role).flatten(0, 1), rows)


def test_what_a_projection_answers_is_its_weight_without_its_bias():
    layer = torch.nn.Linear(3, 2)
    assert_close(answers(layer, torch.eye(3)), layer.weight.mT)


def test_bad_input_is_named():
    view = attention_views(built("llama-2", True))[1]
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


def factored(a, b, k, seed=0, dtype=torch.float64, rank=None):
    generator = torch.Generator().manual_seed(seed)
    left, right, mix = (torch.randn(*n, generator=generator, dtype=torch.float64) for n in ((a, k), (b, k), (k, k)))
    if rank is not None:
        mix = mix[:, :rank] @ mix[:rank]
    return FactoredMatrix((left @ mix).to(dtype), right.to(dtype))


SIZES = st.integers(1, 12)


@settings(max_examples=150, deadline=None)
@given(SIZES, SIZES, st.integers(0, 15), st.integers(0, 15), st.integers(0, 99))
def test_factored_equals_dense(a, b, k, rank, seed):
    matrix = factored(a, b, k, seed, rank=min(rank, k))
    dense, n = matrix.dense(), min(a, b, k)
    assert matrix.shape == dense.shape == (a, b)
    values = matrix.singular_values
    close = dict(rtol=1e-10, atol=1e-10 * (1 + float(dense.norm())))
    assert_close(values, torch.linalg.svdvals(dense)[:n], **close)
    assert (values.diff() <= 0).all()
    u, s, v = matrix.svd()
    assert (u.shape, s.shape, v.shape) == ((a, n), (n,), (b, n))
    assert_close(u * s @ v.T, dense, **close)
    for basis in (u, v):
        assert_close(basis.T @ basis, torch.eye(n, dtype=torch.float64), **EXACT)
