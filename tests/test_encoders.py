"""Encoders promise what decoders do, but for a cache: on tiny models of each, in batches of tokens or of images."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from encoders import ENCODERS, SEES, batches, build, inputs
from families import add_dims
from huggingface_hub import ModelCard
from rebuilt import rebuild_output
from transformers import AutoModelForImageClassification, AutoModelForMaskedLM

from hf_growattn import (
    Grower,
    GrowthConfig,
    attention_views,
    export_model,
    patch_model,
    unpatch_model,
    write_card,
)
from hf_growattn.cli.inspection import inspect_model
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import extra_parameters, sync_config

TOLERANCE = 1e-5  # of the largest output, where nothing but fp32 differs
WITH_STOCK_FORM = ("eurobert", "vit", "dinov2")
EVERY = pytest.mark.parametrize("name", ENCODERS)


@torch.no_grad()
def outputs(model, name):
    return model(**inputs(name))[0]


def auto_class(name):
    return AutoModelForImageClassification if name in SEES else AutoModelForMaskedLM


@pytest.fixture(scope="module")
def grown():
    """Every encoder, grown beside an AdamW that has taken a step, which takes one more; tests work on copies."""
    models = {}

    def get(name):
        if name not in models:
            models[name] = model = patch_model(build(name)).train()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            for grow in (True, False):
                model(**batches(name)[0]).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if grow:
                    grower = Grower(model, GrowthConfig(qk_dims=3, v_dims=2), optimizer)
                    report = grower.find(batches(name)).keep()
                    after = grower.check(batches(name))
            assert report.kept and after < 0.98 * report.loss_before  # on the batches themselves: they are too few
            assert report.cache_bytes == (0, 0) and "KV cache" not in str(report)
            assert {*extra_parameters(model)} <= {*optimizer.state} <= {*model.parameters()}
            widths = [(a.layer, a.width_of("query"), a.width_of("value")) for a in attentions(model)]
            assert widths == [(0, 15, 14), (1, 15, 14)]
        return copy.deepcopy(models[name]).eval()

    return get


@EVERY
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_patching_and_zero_dims_change_no_bit(name, attention):
    model = build(name, attention)
    before, parameters = outputs(model, name), dict(model.named_parameters())
    held = {at: set(vars(module)) for at, module in model.named_modules()}
    forwards = {at: module.forward.__func__ for at, module in model.named_modules()}
    dumped = model.config.to_json_string()
    patch_model(model)
    assert torch.equal(outputs(model, name), before)
    assert all(parameter is parameters[key] for key, parameter in model.named_parameters())
    for layer, module in enumerate(attentions(model)):
        add_dims(module, 3, 1 + layer, roles=("key", "value"))
    assert torch.equal(outputs(model, name), before)
    unpatch_model(model, drop_growth=True)
    assert torch.equal(outputs(model, name), before) and model.config.to_json_string() == dumped
    assert {at: set(vars(module)) for at, module in model.named_modules()} == held  # nothing of ours stays
    assert {at: module.forward.__func__ for at, module in model.named_modules()} == forwards


def test_dropout_of_the_output_takes_new_dims_along():
    model = patch_model(build("bert")).train()
    for attention in attentions(model):
        attention.sibling.dropout.p = 1.0
    before = outputs(model, "bert")
    for attention in attentions(model):
        add_dims(attention, 3, 2)
    assert torch.equal(outputs(model, "bert"), before)


@EVERY
def test_widths_travel_with_a_state(grown, name):
    model, other = grown(name), patch_model(build(name))
    other.load_state_dict(model.state_dict())
    assert torch.equal(outputs(other, name), outputs(model, name))
    again = copy.deepcopy(other)
    for parameter in other.parameters():
        parameter.data.zero_()
    assert torch.equal(outputs(again, name), outputs(model, name))  # a copy holds nothing of its original


@pytest.mark.parametrize("mode, names", [("with-library", ("xlm-roberta", "vit")), ("without-library", ENCODERS)])
def test_fresh_processes_compute_the_same(grown, tmp_path, mode, names):
    jobs, expected = {}, {}
    for name in names:
        model, taken = grown(name), next(iter(inputs(name).values()))
        model.save_pretrained(tmp_path / name)
        jobs[name] = {"path": str(tmp_path / name), "auto_class": auto_class(name).__name__, "new_tokens": 0}
        jobs[name]["input_ids"] = taken.tolist()
        with torch.no_grad():
            expected[name] = model(taken)[0]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    script = Path(__file__).with_name("reload.py")
    subprocess.run(
        [sys.executable, script, tmp_path / "jobs.json", tmp_path / "results.pt", mode],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    for name, result in torch.load(tmp_path / "results.pt", weights_only=True).items():
        assert result["class"].startswith("GrowAttn"), name
        # The same code on the same weights: nothing but memory alignment differs.
        torch.testing.assert_close(result["output"], expected[name], rtol=1e-5, atol=1e-5, msg=name)


@EVERY
def test_views_compute_what_the_module_does(grown, name):
    """Of a grown model and of a stock one."""
    for model in (grown(name), build(name)):
        model.set_attn_implementation("eager")
        views, seen = attention_views(model), {}
        module = views[1].module

        def before(_, args, kwargs, seen=seen):
            seen["x"] = args[0] if args else kwargs["hidden_states"]
            seen["mask"] = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)

        module.register_forward_pre_hook(before, with_kwargs=True)
        projection = views[1].attention.projection_of("output")
        for written in (projection, *(part.out_proj for part in views[1].attention.growths.values())):
            written.register_forward_hook(lambda *call, seen=seen: seen.update(out=seen.get("out", 0) + call[-1]))
        outputs(model, name)
        found = rebuild_output(views[1], seen["x"], causal=False, attention_mask=seen["mask"])
        torch.testing.assert_close(found, seen["out"], rtol=1e-4, atol=1e-4)  # fp32, other orders of summation


@EVERY
def test_stock_forms(grown, name, tmp_path):
    model = patch_model(build(name))
    for layer, attention in enumerate(attentions(model)):
        add_dims(attention, 6 + 6 * layer, 3 + 2 * layer, std=0.1)
    sync_config(model)
    if name not in WITH_STOCK_FORM:
        with pytest.raises(ValueError, match=r"no exact stock form: .*model\.save_pretrained"):
            export_model(model, tmp_path / "m")
    else:
        report = export_model(model, tmp_path / "m")
        stock = auto_class(name).from_pretrained(tmp_path / "m").eval()
        assert type(stock) is type(build(name))
        ours, theirs = outputs(model, name), outputs(stock, name)
        assert (ours - theirs).abs().max() / ours.abs().max() < TOLERANCE
        assert report.parameters[1] == stock.num_parameters() and report.cache_bytes == (0, 0)
    assert inspect_model(patch_model(build(name)))["cache_bytes"] == 0
    task = "image-classification" if name in SEES else "fill-mask"
    write_card(grown(name), tmp_path)
    assert ModelCard.load(tmp_path / "README.md").data.pipeline_tag == task


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
@EVERY
def test_adapters_and_dims_beside(name, monkeypatch):
    """LoRA around the projections, the one beside included, while they grow; and growth as a method of peft."""
    peft = pytest.importorskip("peft")
    from hf_growattn import GrowAttnConfig, initialize_growattn_weights

    model = patch_model(build(name))
    names = attentions(model)[0].layout.names
    targets = {names["query"], names["value"], names.get("output", "attention.output.dense")}
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=list(targets), r=2, init_lora_weights=False))
    assert Grower(adapted, GrowthConfig(qk_dims=2, v_dims=2)).find(batches(name)).keep().kept
    before = outputs(adapted, name)
    torch.testing.assert_close(outputs(adapted.merge_and_unload(), name), before, rtol=1e-4, atol=1e-4)

    adapted = peft.get_peft_model(build(name), GrowAttnConfig(qk_dims=2, v_dims=2))
    assert torch.equal(outputs(adapted, name), outputs(build(name), name))
    monkeypatch.setattr("hf_growattn.grow.growth._measure_fall", lambda *_: (1.0, 0.0))  # so few may not hold
    assert initialize_growattn_weights(adapted, batches(name)).kept
    before = outputs(adapted, name)
    assert not torch.allclose(before, outputs(build(name), name), atol=1e-2)
    merged = adapted.merge_and_unload()
    assert {a.width_of("value") for a in attentions(merged)} == {14}
    torch.testing.assert_close(outputs(merged, name), before, rtol=1e-4, atol=1e-4)


def test_checkpointed_layers_grow(grown):
    model = grown("bert")
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    report = Grower(model, GrowthConfig(v_dims=2)).find(batches("bert")).keep()
    assert report.kept and not any(a.projection_of("output")._forward_hooks for a in attentions(model))


@pytest.mark.parametrize("name", ["mpnet", "deberta-v2"])
def test_others_are_refused_with_the_reason(name):
    from transformers import AutoConfig, AutoModel

    small = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=20)
    with pytest.raises(ValueError, match="SelfAttention takes no attention function from"):
        patch_model(AutoModel.from_config(AutoConfig.for_model(name, **small)))
