"""Views agree with the models they look at, and a factored matrix with the matrix it stands for."""

import pytest
import torch
from conftest import real_batches, real_model
from families import FAMILIES, LLAMA, VARIANTS, build, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, BertConfig, BertModel, LlamaConfig

from hf_growattn import patch_model
from hf_growattn.modeling import attentions
from hf_growattn.views import FactoredMatrix, attention_views

ROLES = ("query", "key", "value", "output")
EVERY = pytest.mark.parametrize("variant", VARIANTS)
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
            old = layer.width(role) - (qk_dims if role in ("query", "key") else v_dims)
            torch.nn.init.normal_(layer.weight(role)[:, old:], std=0.3)
            if layer.bias(role) is not None:
                torch.nn.init.normal_(layer.bias(role)[:, old:], std=0.3)
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
        seen[module.layer_idx] = (kwargs["hidden_states"] if "hidden_states" in kwargs else args[0], output[0])

    hooks = [view.module.register_forward_hook(record, with_kwargs=True) for view in views]
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    return [(view, *seen[view.layer_idx]) for view in views]


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
            assert pattern.shape == (x.shape[-1] + (layer.bias("query") is not None),) * 2
            assert pattern.left.shape[1] == layer.qk_head_dim
            inputs = features(x, pattern.shape[0])
            shared = key[:, head * view.groups // view.heads]
            assert_close(inputs @ pattern @ inputs.mT, query[:, head] @ shared.mT, **EXACT)


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

            found = inputs @ pattern @ inputs.mT
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
        layer.weight(role)[:, :16] = 0
    assert view.pattern(0).norm > 1
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
        assert_close(view.refactored(x), output, **ROTATED)
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
        bias = layer.projection("output").bias
        total = torch.zeros_like(x)
        for head in range(view.heads):
            message = view.message(head)
            assert message.shape == (x.shape[-1] + (layer.bias("value") is not None), x.shape[-1])
            assert message.left.shape[1] == layer.v_head_dim
            # The output projection applied to this head's values alone.
            alone = torch.zeros(*x.shape[:2], view.heads, layer.v_head_dim, dtype=torch.float64)
            alone[:, :, head] = value[:, head * view.groups // view.heads]
            expected = layer.projection("output")(alone.flatten(2)) - (0 if bias is None else bias)
            assert_close(features(x, message.shape[0]) @ message, expected, **EXACT)
            total = total + expected
        assert total.abs().max() > 0.1


# The refactored attention


@GROWN
@EVERY
def test_refactored_attention_is_the_modules_output(variant, grown):
    model = built(variant, grown)
    assert {view.scaling for view in attention_views(model)} != {1.0}
    for view, x, output in recorded(model, input_ids=tokens(2, 11)):
        assert_close(view.refactored(x), output, **(EXACT if "gpt2" in variant else ROTATED))


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
        found = view.refactored(x, causal=False, attention_mask=mask)
        assert_close(found, expected, **ROTATED)
        assert (found - causal).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", FAMILIES)
def test_views_compute_in_single_precision_at_least(variant, dtype):
    for view, x, output in recorded(built(variant, True, dtype), input_ids=tokens(2, 11)):
        assert view.pattern(0, 2).left.dtype == view.message(0).right.dtype == torch.float32
        found = view.refactored(x)
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
        assert_close(view.refactored(x), output, rtol=1e-4, atol=1e-5)  # as ROTATED
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
        view.pattern(0, 3), view.message(0), view.refactored(torch.randn(1, 4, model.config.hidden_size))
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
    assert_close(view.refactored(x), output, **ROTATED)


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


def test_unknown_and_partial_models_are_refused():
    bert = BertModel(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(ValueError, match=r"'bert'\. Known types: gpt2, llama"):
        attention_views(bert)
    with pytest.raises(ValueError, match="has no rotary_emb"):
        attention_views(patch_model(build("llama-2")).model.layers[0])


# Factored matrices


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
    assert_close(matrix.norm, dense.norm(), **close)
    u, s, v = matrix.svd()
    assert (u.shape, s.shape, v.shape) == ((a, n), (n,), (b, n))
    assert_close(u * s @ v.T, dense, **close)
    for basis in (u, v):
        assert_close(basis.T @ basis, torch.eye(n, dtype=torch.float64), **EXACT)
    assert_close(matrix.T.dense(), dense.T, rtol=0, atol=close["atol"])
    assert 0 <= matrix.effective_rank <= n + 1e-9


@settings(max_examples=100, deadline=None)
@given(SIZES, SIZES, SIZES, st.integers(0, 15), st.integers(0, 15), st.integers(0, 99))
def test_products(a, b, c, k, other_k, seed):
    one, other = factored(a, b, k, seed), factored(b, c, other_k, seed + 1)
    dense, close = one.dense(), dict(rtol=1e-9, atol=1e-9)
    product = one @ other
    assert isinstance(product, FactoredMatrix) and product.left.shape[1] == min(k, other_k)
    assert_close(product.dense(), dense @ other.dense(), **close)
    for shape in ((a,), (3, a), (2, 3, a)):
        x = torch.randn(shape, dtype=torch.float64)
        for found in (x @ one, torch.matmul(x, one), x.matmul(one), torch.nn.Parameter(x) @ one):
            assert_close(found.detach(), x @ dense, **close)
    for shape in ((b,), (b, 3), (2, b, 3)):
        x = torch.randn(shape, dtype=torch.float64)
        for found in (one @ x, torch.matmul(one, x)):
            assert_close(found, dense @ x, **close)


def test_effective_rank():
    equal = FactoredMatrix(torch.eye(9, 4), 3 * torch.eye(7, 4))
    assert_close(equal.effective_rank, torch.tensor(4.0))
    values = torch.tensor([3.0, 1.0])
    share = values / 4
    expected = (-(share * share.log()).sum()).exp()
    assert_close(FactoredMatrix(torch.eye(5, 2) * values, torch.eye(6, 2)).effective_rank, expected)
    for zero in (factored(5, 6, 0), FactoredMatrix(torch.zeros(5, 2), torch.randn(6, 2))):
        assert zero.effective_rank == zero.norm == 0
        assert torch.equal(zero.dense(), torch.zeros(5, 6).to(zero.left))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_precisions(dtype):
    matrix, working = factored(8, 6, 3, dtype=dtype), torch.float64 if dtype == torch.float64 else torch.float32
    for found in (matrix.singular_values, matrix.norm, matrix.effective_rank, matrix.dense(), *matrix.svd()):
        assert found.dtype == working
    assert (torch.ones(2, 8, dtype=dtype) @ matrix).dtype == dtype
    assert (torch.ones(2, 8, dtype=torch.float32) @ matrix).dtype == working


def test_a_large_matrix_is_never_formed():
    size = 200_000  # the matrix itself would take 160 GB
    matrix = factored(size, size, 4, dtype=torch.float32)
    assert matrix.singular_values.shape == (4,) and 1 < matrix.effective_rank <= 4
    u, s, v = matrix.svd()
    assert u.shape == v.shape == (size, 4)
    assert_close(s.norm(), matrix.norm)
    x = torch.randn(3, size)
    assert (x @ matrix).shape == (3, size) and (matrix @ x.T).shape == (size, 3)
    assert (matrix @ matrix.T).shape == (size, size)
    assert_close((matrix @ matrix.T).norm, s.square().norm(), rtol=1e-4, atol=0)


def test_what_it_cannot_do_is_refused():
    matrix = factored(5, 6, 2)
    with pytest.raises(ValueError, match=r"not \(5, 2\) and \(6, 3\)"):
        FactoredMatrix(torch.zeros(5, 2), torch.zeros(6, 3))
    with pytest.raises(ValueError, match="FactoredMatrix needs"):
        FactoredMatrix(torch.zeros(2, 5, 2), torch.zeros(2, 6, 2))
    with pytest.raises(TypeError):
        torch.ones(5, 6, dtype=torch.float64) + matrix
    with pytest.raises(TypeError):
        matrix @ 2.0
    with pytest.raises(TypeError):
        2.0 @ matrix
    with pytest.raises(RuntimeError):
        matrix @ torch.ones(5, dtype=torch.float64)
    assert repr(matrix) == "FactoredMatrix(5 x 6, 2 columns)"
