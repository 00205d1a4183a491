"""Growth as a method of peft: new dims beside a frozen base, saved alone, switched, merged, and well started.

Logits are compared to a share of 1e-5 of the largest one where fp32 sums run in another order, and exactly elsewhere.
"""

import copy

import peft
import pytest
import torch
from families import HEADS, build, fingerprint, lm_batches, same, tokens
from families import train as take_steps
from safetensors.torch import load_file
from test_peft import logits, near
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_growattn import GrowAttnConfig, Grower, GrowthConfig, initialize_growattn_weights, patch_model
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import cache_bytes, extra_parameters, set_dims
from hf_growattn.measure.passes import Objective, evaluation_mode, mean_loss

# What peft asks of transformers is not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

# Grouped queries and rotation, with biases; one fused projection with biases; norms on queries and keys.
VARIANTS = ["llama-5-bias", "gpt2-2", "qwen3"]
LLAMA = "llama-2"
DIMS = dict(qk_dims=3, v_dims=2)
BATCHES = lm_batches(24)  # so many that what the guided start finds on them holds
FILE = "adapter_model.safetensors"


def adapted(variant, stirred=True, **kwargs):
    """A model under an adapter; stirred, one that has an effect."""
    model = peft.get_peft_model(build(variant), GrowAttnConfig(**(kwargs or DIMS))).eval()
    return stir(model) if stirred else model


def stir(model, seed=5):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "growattn_" in name:
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def differ(one, other):
    assert (one - other).abs().max() > 0.01 * other.abs().max()


def trainable(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def train(model, steps=4):
    optimizer = torch.optim.AdamW(trainable(model).values(), lr=1e-2)
    return take_steps(model, optimizer, [BATCHES[step % 2] for step in range(steps)])


def is_base(model, variant):
    """Whether the base inside, by its own names, holds what the stock model holds, bit for bit."""
    state = model.get_base_model().state_dict()
    return same({k: v for k, v in state.items() if "growattn_" not in k}, build(variant).state_dict())


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_changes_at_the_start_and_only_new_dims_train(variant, patched):
    model = patch_model(build(variant)) if patched else build(variant)
    expected = logits(model)
    model = peft.get_peft_model(model, GrowAttnConfig(**DIMS)).eval()
    near(logits(model), expected)
    assert trainable(model) and all("growattn_" in name for name in trainable(model))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = train(model, steps=8)
    assert losses[-2] < losses[0]
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == set(trainable(model))
    assert is_base(model, variant)
    with model.disable_adapter():
        assert torch.equal(logits(model), expected)
    differ(logits(model), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_merging_gives_a_grown_model_that_saves_and_reloads(variant, tmp_path):
    model = adapted(variant)
    base = patch_model(build(variant))
    differ(logits(model), logits(base))
    expected = logits(model)
    merged = model.merge_and_unload(safe_merge=True)
    assert not any(parameter.requires_grad for parameter in extra_parameters(merged))
    near(logits(merged), expected)
    assert type(merged) is type(base) and all(len(attention.growths) == 1 for attention in attentions(merged))
    for old, new in zip(attentions(base), attentions(merged)):
        for role, more in (("query", 3), ("value", 2)):
            assert new.width_of(role) == old.width_of(role) + more
        for role in ("query", "key", "value", "output"):
            assert torch.equal(new.weight_of(role), old.weight_of(role))
    merged.save_pretrained(tmp_path)
    assert not any("growattn_" in name for name in load_file(tmp_path / "model.safetensors"))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(merged))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_saved_adapter_is_the_new_dims_alone(variant, tmp_path):
    model = adapted(variant)
    model.save_pretrained(tmp_path / "adapter")
    model.get_base_model().save_pretrained(tmp_path / "base")  # with the adapter on it
    assert set(load_file(tmp_path / "base" / "model.safetensors")) <= set(build(variant).state_dict())
    tensors = load_file(tmp_path / "adapter" / FILE)
    assert all(".extra.adapters.growattn_" in name for name in tensors)
    count = sum(tensor.numel() for tensor in tensors.values())
    assert count == copy.deepcopy(model).merge_and_unload().num_parameters() - build(variant).num_parameters()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert torch.equal(logits(base), logits(build(variant)))
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.equal(logits(loaded), logits(model)) and not trainable(loaded)


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_adapters(variant, tmp_path):
    base = logits(build(variant))
    model = adapted(variant)
    model.add_adapter("other", GrowAttnConfig(qk_dims=1, layers=[1]))
    assert not any(".other." in name for name in trainable(model))
    stir(model, seed=6)
    found = {}
    for name in ("default", "other"):
        model.set_adapter(name)
        found[name] = logits(model)
        assert trainable(model) and all(f".{name}." in parameter for parameter in trainable(model))
    for one, other in (("default", "other"), ("default", None), ("other", None)):
        differ(found[one], base if other is None else found[other])
    model.base_model.set_adapter(["default", "other"])
    both = logits(model)
    near(logits(copy.deepcopy(model).merge_and_unload()), both)
    near(logits(copy.deepcopy(model).merge_and_unload(adapter_names=["other"])), found["other"])
    for name in found:
        model.set_adapter(name)
        model.merge_adapter()
        near(logits(model), found[name])
        model.unmerge_adapter()

    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(build(variant), tmp_path).eval()
    again.load_adapter(tmp_path / "other", adapter_name="second", is_trainable=True)
    assert torch.equal(logits(again), found["default"])
    again.set_adapter("second")
    assert torch.equal(logits(again), found["other"])

    model.set_adapter("default")
    model.delete_adapter("other")
    assert torch.equal(logits(model), found["default"])
    assert not any(".other." in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("variant", VARIANTS)
def test_merging_for_a_while(variant):
    base = logits(build(variant))
    model = adapted(variant)
    expected = logits(model)
    model.merge_adapter()
    assert attentions(model)[0].width_of("key") == 19
    assert model.get_base_model().config.extra_dims["0"] == {"growth_1": [3, 2]}
    near(logits(model), expected)
    model.unmerge_adapter()
    assert torch.equal(logits(model), expected) and is_base(model, variant)
    model.merge_adapter()
    with model.disable_adapter():
        assert torch.equal(logits(model), base)
    assert torch.equal(logits(model), expected)  # unmerged, as under peft's own methods


def test_the_cache_of_an_active_adapter_counts():
    model = adapted(LLAMA)
    active = cache_bytes(model.get_base_model())
    with model.disable_adapter():
        assert cache_bytes(model.get_base_model()) == cache_bytes(patch_model(build(LLAMA))) < active


def test_unloading_gives_back_what_there_was():
    for base in (build(LLAMA), patch_model(build(LLAMA))):
        kind, before, expected = type(base), dict(base.named_parameters()), logits(base)
        model = stir(peft.get_peft_model(base, GrowAttnConfig(**DIMS)))
        model.merge_adapter()
        model.unload()
        assert type(base) is kind and base.state_dict().keys() == before.keys()
        assert torch.equal(logits(base), expected)
        near(logits(peft.get_peft_model(base, GrowAttnConfig(v_dims=1))), expected)


@pytest.mark.parametrize("dims", [dict(qk_dims=2), dict(v_dims=2)], ids=["qk", "v"])
def test_one_kind_alone(dims):
    model = adapted(LLAMA, **dims)
    modules = {name.split("growattn_")[1].split(".")[0] for name in trainable(model)}
    assert modules == ({"in_projection"} if "qk_dims" in dims else {"in_projection", "out_projection"})
    expected = logits(model)
    differ(expected, logits(build(LLAMA)))
    near(logits(model.merge_and_unload()), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_guided_start_is_what_growth_finds(variant):
    grown = patch_model(build(variant))
    growth = Grower(grown, GrowthConfig(**DIMS, old_dims_train=False)).find(BATCHES).keep()
    model = adapted(variant, stirred=False)
    model.add_adapter("other", GrowAttnConfig(**DIMS))  # has no part in it
    stir(model, seed=8)
    model.set_adapter("default")
    model.add_adapter("fresh", GrowAttnConfig(**DIMS))
    base = model.get_base_model()
    before = fingerprint(base)
    report = initialize_growattn_weights(model, BATCHES, adapter_name="fresh")
    after = fingerprint(base)
    for parameters in (before[0], after[0]):
        for name in [name for name in parameters if ".fresh." in name]:
            del parameters[name]
    assert same(before, after) and is_base(model, variant)

    assert report.kept and report.fall > 0.1
    assert (report.loss_before, report.fall) == (growth.loss_before, growth.fall)
    model.set_adapter("fresh")
    with evaluation_mode(base):
        assert mean_loss(Objective(base), BATCHES) < report.loss_before - 0.1
    assert same(dict(model.merge_and_unload().state_dict()), dict(grown.state_dict()))


@pytest.mark.parametrize("config", [DIMS, dict(budget=0.08)], ids=["dims", "budget"])
def test_a_guided_start_that_finds_nothing_leaves_the_adapter(config, no_step):
    model = adapted(LLAMA, **config)
    before, dims = fingerprint(model.get_base_model()), model.peft_config["default"].dims
    assert not initialize_growattn_weights(model, BATCHES).kept
    with pytest.raises(ValueError, match="There are no batches"):
        initialize_growattn_weights(model, [])
    assert same(fingerprint(model.get_base_model()), before) and model.peft_config["default"].dims == dims


def test_trainer_trains_saves_and_resumes(tmp_path):
    def trainer(model, steps):
        rows = [{key: value[0] for key, value in batch.items()} for batch in BATCHES]
        arguments = TrainingArguments(
            str(tmp_path), max_steps=steps, save_steps=2, learning_rate=1e-2, use_cpu=True, report_to="none"
        )
        return Trainer(model, arguments, train_dataset=rows)

    model = adapted(LLAMA, stirred=False)
    trainer(model, 4).train()
    assert is_base(model, LLAMA)
    assert all("growattn_" in name for name in load_file(tmp_path / "checkpoint-4" / FILE))
    loaded = peft.PeftModel.from_pretrained(build(LLAMA), tmp_path / "checkpoint-4")
    assert torch.equal(logits(loaded.eval()), logits(model.eval()))
    resumed = adapted(LLAMA, stirred=False)
    trainer(resumed, 4).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(logits(resumed.eval()), logits(model))


def test_adapters_compile_in_one_graph_and_load_onto_empty_weights(tmp_path):
    model = adapted(LLAMA)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    near(logits(torch.compile(model.get_base_model(), fullgraph=True, backend="eager")), expected)
    loaded = peft.PeftModel.from_pretrained(build(LLAMA), tmp_path, low_cpu_mem_usage=True).eval()
    assert torch.equal(logits(loaded), expected)


def test_a_classifier_trains_its_head_along(tmp_path):
    base = build(LLAMA, HEADS["sequence-classification"])
    model = stir(peft.get_peft_model(base, GrowAttnConfig(**DIMS, task_type="SEQ_CLS"))).eval()
    assert any("score.modules_to_save" in name for name in trainable(model))
    model.base_model.model.score.modules_to_save["default"].weight.data.normal_()
    ids = {"input_ids": BATCHES[0]["input_ids"], "return_dict": True}  # older peft asks a deprecated name otherwise
    with torch.no_grad():
        expected = model(**ids).logits
        model.save_pretrained(tmp_path)
        loaded = peft.PeftModel.from_pretrained(build(LLAMA, HEADS["sequence-classification"]), tmp_path).eval()
        assert torch.equal(loaded(**ids).logits, expected)
        near(loaded.merge_and_unload()(**ids).logits, expected)


def test_a_base_in_half_precision_and_one_that_grew_before(tmp_path):
    base = build(LLAMA, dtype=torch.bfloat16)
    expected = logits(base)
    model = peft.get_peft_model(base, GrowAttnConfig(**DIMS))
    assert torch.equal(logits(model), expected)
    assert {parameter.dtype for parameter in trainable(model).values()} == {torch.float32}  # as peft does with LoRA
    assert initialize_growattn_weights(model, BATCHES).kept
    train(model, steps=1)

    grown = patch_model(build(LLAMA))
    assert Grower(grown, GrowthConfig(qk_dims=4, v_dims=5)).find(BATCHES).keep().kept
    model = stir(peft.get_peft_model(grown, GrowAttnConfig(**DIMS))).eval()
    expected = logits(model)
    model.save_pretrained(tmp_path)
    assert all(".extra.adapters." in name for name in load_file(tmp_path / FILE))  # what was kept is of the base
    again = patch_model(build(LLAMA))
    set_dims(again, grown.config.extra_dims)
    again.load_state_dict(grown.state_dict(), strict=False)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(again, tmp_path).eval()), expected)
    merged = model.merge_and_unload()
    assert list(attentions(merged)[0].extra.growths) == ["growth_1", "growth_2"]
    near(logits(merged), expected)


def test_adapters_that_are_merged_are_saved_as_adapters(tmp_path):
    model = adapted(LLAMA)
    expected = logits(model)
    model.merge_adapter()
    model.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "growth").exists()
    assert attentions(model)[0].width_of("key") == 19  # still merged
    near(logits(model), expected)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(build(LLAMA), tmp_path / "adapter").eval()), expected)


def test_saving_leaves_another_adapter_than_the_active_one_merged(tmp_path):
    model = adapted(LLAMA)
    model.add_adapter("other", GrowAttnConfig(qk_dims=1))
    stir(model)
    model.merge_adapter(["other"])
    expected = logits(model)
    model.save_pretrained(tmp_path)
    near(logits(model), expected)


def test_one_config_serves_several_adapters_each_with_its_own_budget(tmp_path):
    config = GrowAttnConfig(budget=0.05)
    model = peft.get_peft_model(build(LLAMA), config)
    model.add_adapter("other", config)
    initialize_growattn_weights(model, BATCHES)
    assert GrowAttnConfig(dims={0: [2, 1]}).dims == {"0": [2, 1]}
    assert config.dims is None and model.peft_config["other"].dims != model.peft_config["default"].dims
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(build(LLAMA), tmp_path)
    loaded.load_adapter(tmp_path / "other", "other")
    for name in ("default", "other"):
        model.set_adapter(name)
        loaded.set_adapter(name)
        assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)
