"""The ways to train: as many weights each, nothing else moved, and new dims next to LoRA at a rate of their own."""

from statistics import fmean

import encoders
import families
import pytest
import torch
from families import lm_batches
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_growattn import Grower, GrowthConfig, Method, load_growth, patch_model
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import sync_config
from hf_growattn.training import methods
from hf_growattn.training.methods import choose_rank, share_of_new_dims, weights_of_rank_one

OPTIONS = {"budget": 0.3, "growth_batches": 4}


def trained_weights(model) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", ["lora", "growth", "mix"])
@pytest.mark.parametrize("variant", ["llama-2", "gpt2-2", "bert"])
def test_every_method_trains_as_many_weights_and_moves_nothing_else(variant, name):
    build = encoders.build if variant in encoders.ENCODERS else families.build
    stock, budget = build(variant), choose_rank(build(variant), 0.3, {}) * weights_of_rank_one(build(variant), {})
    ids = torch.randint(0, stock.config.vocab_size, (4, 4, 16), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": rows, "labels": rows} for rows in ids]
    model, groups = Method(name, **OPTIONS).prepare(build(variant), batches)
    weights = trained_weights(model)
    assert weights == budget if name == "lora" else 0 < weights <= budget
    assert all(set(module.scaling.values()) == {2.0} for module in model.modules() if isinstance(module, LoraLayer))
    assert weights == sum(p.numel() for group in groups for p in group["params"])
    optimizer = torch.optim.AdamW(groups)
    model(**batches[0]).loss.backward()
    optimizer.step()
    after = {key.replace(".base_layer", ""): value for key, value in model.state_dict().items()}
    for key, value in stock.state_dict().items():
        found = after[key] if key in after else after[f"base_model.model.{key}"]
        assert torch.equal(found, value), key


@pytest.mark.parametrize("variant", ["llama-5-bias", "gpt2-2"])
def test_a_mix_leaves_alone_what_grew_before(variant):
    """The new dims of another training belong to no budget of this one."""
    model = patch_model(families.build(variant))
    for attention in attentions(model):
        attention.add_new_dims("growth_1", qk_dims=2, v_dims=6)
    sync_config(model)
    budget, base = choose_rank(model, 0.3, {}) * weights_of_rank_one(model, {}), model.num_parameters()
    mix, groups = Method("mix", **OPTIONS).prepare(model, lm_batches(4))
    added = sum(p.numel() for p in mix.parameters()) - base
    assert trained_weights(mix) == added == sum(p.numel() for group in groups for p in group["params"]) <= budget


@pytest.mark.parametrize("width, share", [(16, 1.0), (64, 1.0), (256, 0.125), (4096, 1 / 30)])
def test_new_dims_next_to_lora_take_smaller_steps_in_wider_models(width, share):
    assert share_of_new_dims(width) == share


@pytest.mark.parametrize("name", ["lora", "growth", "mix"])
def test_a_mix_trains_at_two_learning_rates(name, monkeypatch):
    monkeypatch.setattr(methods, "share_of_new_dims", lambda width: 0.1)
    model, groups = Method(name, learning_rate=0.01, **OPTIONS).prepare(families.build("llama-2"), lm_batches(4))
    adapters = {p for key, p in model.named_parameters() if "lora_" in key}
    pairs = {(round(group["lr"], 9), p in adapters) for group in groups for p in group["params"]}
    assert pairs == {"lora": {(0.01, True)}, "growth": {(0.01, False)}, "mix": {(0.01, True), (0.001, False)}}[name]


@pytest.mark.parametrize("name, trains", [("growth", False), ("mix", True), ("all_growth", None)])
def test_growth_on_a_frozen_base_does_the_work_of_old_dims_too(name, trains, monkeypatch):
    """LoRA moves the old dims; without it nothing does, and new ones must not leave it to them."""
    configs = []

    def record(model, config, **options):
        configs.append(config)
        return Grower(model, config, **options)

    monkeypatch.setattr(methods, "Grower", record)
    Method(name, **OPTIONS).prepare(families.build("llama-2"), lm_batches(4))
    assert [config.old_dims_train for config in configs] == [trains]


def test_heads_without_room_are_said_to_have_none():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**families.LLAMA | sizes | {"head_dim": 32}))
    with pytest.raises(ValueError, match="as wide as their input or the config's limits, so there is no room"):
        Method("growth", **OPTIONS).prepare(model, lm_batches(4))
    report = Grower(patch_model(model), GrowthConfig(budget=0.1)).grow(lm_batches(4))
    assert "so there is no room" in " ".join(str(report).split()) and "more batches" not in str(report)


def test_a_budget_is_that_of_the_nearest_rank():
    model = families.build("llama-2")
    cost = weights_of_rank_one(model, {})
    ranks = [choose_rank(model, round(share * cost), {}) for share in (0.6, 1.4, 1.6)]
    assert ranks == [1, 1, 2]


def test_random_new_dims_change_nothing_at_first():
    batches, widths = lm_batches(4), {}
    stock = families.build("llama-5-bias")
    for name in ("growth", "random"):
        model, _ = Method(name, **OPTIONS).prepare(families.build("llama-5-bias"), batches)
        same = torch.allclose(model(**batches[0]).logits, stock(**batches[0]).logits, atol=1e-5)
        assert same == (name == "random")
        widths[name] = [(each.width_of("key"), each.width_of("value")) for each in attentions(model)]
    assert widths["growth"] == widths["random"]


def test_a_mix_is_saved_and_loaded(tmp_path):
    mix, _ = Method("mix", modules_to_save=["lm_head"], **OPTIONS).prepare(families.build("llama-2"), lm_batches(4))
    with torch.no_grad():
        for parameter in mix.parameters():
            parameter += 0.01 * parameter.requires_grad
    mix.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(patch_model(families.build("llama-2")), tmp_path)
    load_growth(loaded, tmp_path / "growth")
    ids = families.tokens()
    assert torch.equal(loaded.eval()(ids).logits, mix.eval()(ids).logits)


class Answering(nn.Module):
    """A transformers model inside a module of somebody's own, which returns a dict."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.answer = families.build("llama-2").model, nn.Linear(48, 4)

    def forward(self, asked, labels):
        logits = self.answer(self.body(asked).last_hidden_state[:, -1])
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_a_module_around_the_model_gives_its_loss_and_takes_adapters_again(tmp_path):
    batches = [{"asked": families.tokens(seed=n), "labels": torch.tensor([n % 4] * 3)} for n in range(8)]
    around = Answering()
    patch_model(around.body)
    expected = fmean(around(**batch)["loss"].item() for batch in batches)
    assert Grower(around, GrowthConfig(qk_dims=2)).measure(batches).loss_before == pytest.approx(expected, rel=1e-5)
    mix, _ = Method("mix", budget=0.5, modules_to_save=["answer"]).prepare(Answering(), batches)
    with torch.no_grad():
        for parameter in mix.parameters():
            parameter += 0.01 * parameter.requires_grad
    mix.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(Answering(), tmp_path)
    assert torch.equal(loaded.eval()(**batches[0])["logits"], mix.eval()(**batches[0])["logits"])


def test_a_layer_whose_name_peft_takes_for_its_own_is_refused():
    model = nn.ModuleDict({"body": families.build("llama-2").model, "out": nn.Linear(4, 4)})
    with pytest.raises(ValueError, match=r"modules_to_save=\['out'\] for modules of its own.* Rename yours"):
        Method("lora", modules_to_save=["out"], **OPTIONS).prepare(model)


def test_a_method_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="no method 'both': choose one of lora, growth, mix"):
        Method("both")
