"""New dims join by two hooks: the attention keeps its class and its forward, and nothing else sees a call under way."""

import copy
import importlib
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import peft
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from families import add_dims, build, build_encoder_decoder, lm_batches, padded, tokens, wide
from test_families import traces
from transformers import AttentionInterface, BertConfig, BertForSequenceClassification
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_growattn import GrowAttnConfig, Grower, GrowthConfig, patch_model, unpatch_model
from hf_growattn.growable.attention import attentions, set_trial
from hf_growattn.model import hooks

CONFIG = GrowthConfig(qk_dims=2, v_dims=2)


def bert():
    size = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    return BertForSequenceClassification(BertConfig(**size)).eval()


def grown(model):
    return wide(model, 3, 2)


@pytest.fixture(autouse=True)
def no_call_left_behind(monkeypatch):
    """A model that another test interrupted may have left its call in this thread."""
    monkeypatch.setattr(hooks, "_thread", threading.local())


@pytest.mark.parametrize("make", [lambda: build("llama-2"), bert])
@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_hooks_come_off_a_copy_and_stay_on_its_original(make, twin_of):
    model, stock = grown(make()), traces(make())
    before = traces(model)
    twin = twin_of(model)
    unpatch_model(twin, drop_growth=True)
    assert traces(twin) == stock and traces(model) == before != stock


def test_a_forward_past_the_attention_function_is_refused():
    model = grown(build("llama-2"))
    attentions(model)[0].module.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(RuntimeError, match="did not call its attention function, so its new dims are lost"):
        model(tokens())


def test_another_cache_leaves_what_is_given_by_position_behind_it():
    arguments = hooks.Arguments(("hidden_states", "past_key_values", "mask"))
    assert arguments.with_value("past_key_values", 9, (1, 2, 3), {}) == ((1, 9, 3), {})
    assert arguments.with_value("past_key_values", 9, (1,), {"mask": 3}) == ((1,), {"past_key_values": 9, "mask": 3})


def test_new_dims_of_a_sibling_that_come_off_leave_nothing_behind():
    model, inputs = bert(), torch.randint(0, 60, (2, 12))
    expected = model(inputs).logits
    model = peft.get_peft_model(model, GrowAttnConfig(qk_dims=2, v_dims=2)).eval()
    for parameter in (parameter for name, parameter in model.named_parameters() if "growattn" in name):
        torch.nn.init.normal_(parameter)
    assert not torch.allclose(model(inputs).logits, expected, atol=1e-2)
    with model.disable_adapter():
        assert torch.equal(model(inputs).logits, expected)


def test_the_table_gives_others_the_stock_function():
    model = grown(build("llama-2"))
    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]
    seen = []

    def ask(module, args):
        seen.append(ALL_ATTENTION_FUNCTIONS["sdpa"] is stock)

    model.model.layers[0].mlp.register_forward_pre_hook(ask)  # not an attention's call
    model(tokens())
    assert seen == [True] and ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None) is stock


@pytest.mark.parametrize("make", [lambda: build("llama-2"), bert])
def test_threads_that_share_a_model_compute_what_one_does(make):
    model = grown(make())
    requests = [torch.randint(0, 60, (2, 12)) for _ in range(40)]
    with torch.no_grad():
        expected = [model(each).logits for each in requests]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(torch.no_grad()(lambda each: model(each).logits), requests))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected))


@torch.no_grad()
def test_an_attention_function_of_ones_own_runs_in_grown_layers():
    widths = []

    def own(module, query, key, value, *args, **kwargs):
        widths.append(query.shape[-1])
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, *args, **kwargs)

    AttentionInterface.register("own", own)
    try:
        model = grown(build("llama-2"))
        model.set_attn_implementation("sdpa")
        expected = model(tokens()).logits
        model.set_attn_implementation("own")
        # What the function asks the table for, amid a call, passes it by: dims join once.
        assert torch.equal(model(tokens()).logits, expected) and widths == [19, 19]
    finally:
        del AttentionInterface._global_mapping["own"]


@torch.no_grad()
def test_a_later_pre_hook_that_changes_the_input_is_refused():
    """New dims would see another input than the old ones; with prepend=True both see the changed one."""

    def double(module, args, kwargs):
        return args, kwargs | {"hidden_states": 2 * kwargs["hidden_states"]}

    early, model = build("llama-2"), build("llama-2")
    early.model.layers[0].self_attn.register_forward_pre_hook(double, with_kwargs=True)
    for each in (early, model):
        torch.manual_seed(0)
        grown(each)
    expected = early(tokens()).logits
    attention = model.model.layers[0].self_attn
    late = attention.register_forward_pre_hook(double, with_kwargs=True)
    with pytest.raises(RuntimeError, match=r"pre-hook changed the input.*prepend=True"):
        model(tokens())
    late.remove()
    attention.register_forward_pre_hook(double, with_kwargs=True, prepend=True)
    assert torch.equal(model(tokens()).logits, expected)


@torch.no_grad()
def test_a_later_pre_hook_that_changes_what_cross_attention_reads_is_refused():
    def double(module, args, kwargs):
        return args, {name: 2 * value if name == "key_value_states" else value for name, value in kwargs.items()}

    model = grown(build_encoder_decoder())
    cross = model.get_submodule(next(each.name for each in attentions(model) if "encoder_attn" in each.name))
    cross.register_forward_pre_hook(double, with_kwargs=True)
    with pytest.raises(RuntimeError, match="pre-hook changed the input"):
        model(**padded())


@torch.no_grad()
def test_forward_hooks_of_others_see_the_share_of_new_dims():
    model, seen = build("llama-2"), []
    module = model.model.layers[0].self_attn
    module.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    grown(model)
    module.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    model(tokens())
    assert torch.equal(*seen)


@torch.no_grad()
def test_a_call_amid_the_call_of_another_module():
    model, other = grown(build("llama-2")), grown(build("llama-2"))
    expected = model(tokens()).logits
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: other(tokens()) and None)
    assert torch.equal(model(tokens()).logits, expected)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_forward_that_ends_early_leaves_nothing_behind(error):
    """Activations would stay alive, and a model that holds them has no copy."""
    model = grown(build("llama-2"))
    before = model(tokens()).logits
    attention = attentions(model)[0]
    set_trial(attention, attention.make_new_dims(2, 2))

    def fail(*_):
        raise error

    handle = attention.module.o_proj.register_forward_pre_hook(fail)
    with pytest.raises(error):
        model(tokens())
    handle.remove()
    set_trial(attention, None)
    # Torch calls no hook after an interrupt: what that leaves behind goes with the model's next forward.
    assert (hooks._thread.call is None) == (error is not KeyboardInterrupt)
    assert torch.equal(copy.deepcopy(model)(tokens()).logits, before)
    add_dims(attention, 2, 2)
    after = model(tokens()).logits
    assert hooks._thread.call is None
    assert torch.equal(model(tokens()).logits, after)


@pytest.mark.parametrize("make", [lambda: build("llama-2"), bert])
def test_what_accelerate_hooked_before_the_patch_gains_new_dims(make):
    """A hooked module keeps a bound forward, in BERT's family also the one that projects the output."""
    found = []
    for hooked in (False, True):
        torch.manual_seed(1)
        model = make()
        for module in model.modules() if hooked else ():
            add_hook_to_module(module, ModelHook())
        torch.manual_seed(1)
        found.append(grown(model)(torch.arange(24).view(2, 12)).logits)
    assert torch.equal(*found)


def test_dropout_of_the_output_takes_new_dims_along():
    model = patch_model(bert()).train()
    model.dropout.p = 0.0
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for attention in attentions(model):
        attention.sibling.dropout.p = 1.0
    before = model(torch.arange(24).view(2, 12)).logits
    assert torch.equal(grown(model)(torch.arange(24).view(2, 12)).logits, before)


@torch.no_grad()
def test_two_copies_of_the_code_serve_two_models():
    """One that came with a checkpoint next to the installed one: each joins its own dims alone."""
    ours = grown(build("llama-2"))
    expected = ours(tokens()).logits
    names = [name for name in sys.modules if name.startswith("hf_growattn.model")]
    kept = {name: sys.modules.pop(name) for name in names}
    wrapped = {name: getattr(AttentionInterface, name) for name in ("get_interface", "__getitem__")}
    try:
        other = importlib.import_module("hf_growattn.model.modeling")
        theirs = other.WideModelMixin.mixed_into(type(build("llama-2")))(ours.config).eval()
        theirs.load_state_dict(ours.state_dict())
        assert type(theirs.model.layers[0].self_attn.extra) is not type(ours.model.layers[0].self_attn.extra)
        for _ in range(2):
            assert torch.equal(theirs(tokens()).logits, expected) and torch.equal(ours(tokens()).logits, expected)
    finally:
        for name, method in wrapped.items():
            setattr(AttentionInterface, name, method)
        for name in [name for name in sys.modules if name.startswith("hf_growattn.model")]:
            del sys.modules[name]
        sys.modules.update(kept)


@torch.no_grad()
def test_replicas_of_a_model_take_their_own_shares():
    """As DataParallel makes them: children that are copies, and hooks that all have in common."""
    for model, inputs in ((grown(build("llama-2")), tokens()), (grown(bert()), torch.randint(0, 60, (2, 12)))):
        expected = model(inputs).logits

        def replicate(module):
            twin = module._replicate_for_data_parallel()
            for name, child in module._modules.items():
                twin._modules[name] = None if child is None else replicate(child)
            for name, parameter in module._parameters.items():
                twin._parameters[name] = parameter
            return twin

        replica = replicate(model)
        assert torch.equal(replica(inputs).logits, expected)


def test_a_parent_that_calls_forward_itself_is_found_out():
    """Hooks run only where the module itself is called."""
    model = patch_model(build("llama-2"))
    layer = model.model.layers[1]
    module = layer.self_attn

    class Past(torch.nn.Module):
        def forward(self, *args, **kwargs):
            return module.forward(*args, **kwargs)

    del layer.self_attn
    layer.self_attn, layer.hidden = Past(), module
    with pytest.raises(ValueError, match=r"LlamaAttention.*forward.*itself"):
        Grower(model, CONFIG).find(lm_batches()).keep()
