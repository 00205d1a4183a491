"""What every kind of model promises, on tiny random models and on a real pretrained Llama."""

import copy
import logging

import pytest
import torch
from families import FAMILIES, HEADS, add_dims, build_encoder_decoder, lm_batches, padded, tokens, wide
from models import BY_ATTENTION, MECHANISMS, MODELS, batches, build, outputs
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_growattn import Grower, GrowthConfig, patch_model, unpatch_model
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import extra_parameters, sync_config

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called")
# Some CPU kernels sum in another order for heads of other widths: a few fp32 ulps.
ROUNDED = ("stories260K", "deepseek_v3")


def traces(model) -> dict:
    """All that a library could have put on the modules of a model."""
    return {
        name: (type(module), module.forward.__func__, {*vars(module)}, [len(getattr(module, hook)) for hook in HOOKS])
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("name, attention", BY_ATTENTION)
def test_patching_and_new_dims_without_effect_change_no_bit_and_come_off(name, attention):
    model, given = build(name, attention), batches(name, 2)
    before, parameters = [outputs(model, batch) for batch in given], dict(model.named_parameters())
    left, dumped = traces(model), model.config.to_json_string()
    assert patch_model(model) is patch_model(model) is model
    assert all(torch.equal(outputs(model, batch), logits) for batch, logits in zip(given, before))
    after = dict(model.named_parameters())
    assert after.keys() == parameters.keys() and all(after[key] is parameters[key] for key in parameters)
    layers, found = attentions(model), traces(model)
    assert layers and all(found[layer.name] == left[layer.name] for layer in layers)  # attention stays as it is
    for index, layer in enumerate(layers):
        add_dims(layer, qk_dims=8 + 4 * index, v_dims=4, roles=("key", "value"))
    for batch, logits in zip(given, before):
        if name in ROUNDED or attention is None:
            torch.testing.assert_close(outputs(model, batch), logits, rtol=2e-5, atol=2e-5)
        else:
            assert torch.equal(outputs(model, batch), logits)
    with pytest.raises(ValueError, match="export_model"):
        unpatch_model(model)
    assert unpatch_model(unpatch_model(model, drop_growth=True)) is model
    assert traces(model) == left and model.config.to_json_string() == dumped
    assert all(torch.equal(outputs(model, batch), logits) for batch, logits in zip(given, before))


@pytest.mark.parametrize("name", MODELS)
def test_it_grows_and_travels_and_generates(name, tmp_path, caplog):
    build(name).save_pretrained(tmp_path / "stock")  # some families convert their weights when they are loaded
    model, given = patch_model(type(build(name)).from_pretrained(tmp_path / "stock").eval()), batches(name)
    other, before = copy.deepcopy(model), outputs(model, given[0])
    report = Grower(model, GrowthConfig(qk_dims=4, v_dims=2)).find(given).keep()
    assert report.kept and "weights added" in str(report)  # encoders have no cache to tell of
    attentions(model)[-1].add_new_dims("growth_2", 3, 0)
    for weight in (weight for weight in extra_parameters(model) if weight.dim() == 2):
        weight.data += 0.05 * torch.randn_like(weight)  # whatever the growth found
    sync_config(model)
    grown = outputs(model, given[0])
    assert not torch.allclose(grown, before, atol=1e-3)

    model.save_pretrained(tmp_path / "grown")
    loaded = type(model).from_pretrained(tmp_path / "grown").eval()
    torch.testing.assert_close(outputs(loaded, given[0]), grown, rtol=1e-6, atol=1e-6)  # memory alignment alone differs
    files = [load_file(tmp_path / folder / "model.safetensors") for folder in ("stock", "grown")]
    assert all(torch.equal(files[1][key], value) for key, value in files[0].items())
    assert all(".extra.growths.growth_" in key for key in files[1].keys() - files[0].keys())

    other.load_state_dict(model.state_dict())
    assert outputs(other, given[0]).equal(grown) and other.config.extra_dims == model.config.extra_dims
    twin = copy.deepcopy(other)
    for parameter in other.parameters():
        parameter.data.zero_()
    assert outputs(twin, given[0]).equal(grown)  # a copy holds nothing of its original
    if model.can_generate():
        prompt = {key: value for key, value in given[0].items() if key != "labels"}
        options = dict(max_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_logits=True)
        if hasattr(model.config, "image_token_id"):  # to generate one would ask for an image
            options["suppress_tokens"] = [model.config.image_token_id]
        with caplog.at_level(logging.ERROR, logger="transformers"):  # Whisper's generate gives deprecated arguments
            cached, full = (model.generate(**prompt, **options, use_cache=use_cache) for use_cache in (True, False))
            if name == "umt5":  # the stock class of transformers 5.16 forgets its causal mask without a cache
                stock = (build(name).generate(**prompt, **options, use_cache=use_cache) for use_cache in (True, False))
                first, second = (torch.stack(generated.logits) for generated in stock)
                if not torch.allclose(first, second, atol=1e-4):
                    pytest.skip("the stock class generates something else without a cache")
        assert torch.equal(cached.sequences, full.sequences)
        # fp32, another order of summation for one query at a time.
        torch.testing.assert_close(torch.stack(cached.logits), torch.stack(full.logits), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def mean_loss_of(model, given: list) -> float:
    return sum(model(**batch).loss.item() for batch in given) / len(given)


@pytest.mark.parametrize("name", MECHANISMS)
def test_growth_lowers_the_loss_of_fresh_batches_and_says_so(name):
    model, real = patch_model(build(name)), name == "stories260K"
    given = batches(name, 8 if real else 32)  # enough for each family to hold
    fresh = batches(name, 12)[8:] if real else lm_batches(8, seed=500)
    before = mean_loss_of(model, fresh)
    report = Grower(model, GrowthConfig(qk_dims=4)).grow(given)
    assert report.kept
    assert report.fall > 0.01 * report.loss_before
    assert mean_loss_of(model, fresh) < before - 0.01 * report.loss_before
    assert [layer.width[1] - layer.width[0] for layer in report.layers] == [4] * len(report.layers)


@pytest.mark.parametrize("name", [*FAMILIES, "qwen3"])
def test_a_second_model_is_untouched(name):
    config = build(name).config
    first, second = (AutoModelForCausalLM.from_config(config).eval() for _ in range(2))
    shared = type(second)(second.config).eval()
    assert shared.config is second.config
    left, before, dumped = traces(second), second(tokens()).logits, second.config.to_json_string()
    patch_model(first)
    patch_model(shared).config.id2label[0] = "of this model alone"
    assert Grower(shared, GrowthConfig(qk_dims=4, layers=[0])).find(batches(name)).keep().kept
    assert traces(second) == left and second.config.to_json_string() == dumped
    assert torch.equal(second(tokens()).logits, before)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("variant", FAMILIES)
def test_every_head_class_grows(variant, head):
    model = wide(variant, 0, auto_class=HEADS[head])
    labels = {"causal-lm": tokens(), "sequence-classification": torch.tensor([0, 1, 1])}
    batch, given = {**padded(), "labels": labels.get(head, tokens() % 2)}, []
    for near_last in range(2, 10):  # labels are random, so only rows that are nearly the same bear it out
        given.append({**batch, "input_ids": batch["input_ids"].clone()})
        given[-1]["input_ids"][:, -2] = near_last
    report = Grower(model, GrowthConfig(qk_dims=4)).grow(given)
    assert report.kept and mean_loss_of(model, given) < report.loss_before


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", [*FAMILIES, "bert", "bart"])
def test_activation_checkpointing_gives_the_same_gradients(name, reentrant):
    batch = batches(name, 1)[0]

    def gradients(model):
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        model(**batch).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    model = wide(build(name), 6, 3)
    plain = gradients(copy.deepcopy(model))
    # The name of transformers 5.23, or the one before.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}])
def test_an_encoder_and_a_decoder(options):
    model = wide(build_encoder_decoder(), 4, 2)
    assert len(attentions(model)) == 3
    batch = padded() | {"max_new_tokens": 6, "do_sample": False}
    beams = {"num_beams": options.get("num_beams", 1)}
    assert torch.equal(model.generate(**batch, **options), model.generate(**batch, **beams, use_cache=False))
