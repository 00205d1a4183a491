"""Small promises, each of a line or two of the package: what no larger test would notice if it broke."""

import copy
import json
import os
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from compared import directions_from_products
from families import build, lm_batches, tokens, word_tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    Trainer,
    TrainingArguments,
)
from transformers.models.auto import tokenization_auto

from hf_growattn import GrowAttnConfig, Grower, GrowthCallback, GrowthConfig, patch_model
from hf_growattn.cli.commands import main
from hf_growattn.grow import growth as growing
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import extra_parameters, origin_of, sync_config
from hf_growattn.interop import checkpoints
from hf_growattn.interop.cards import write_card
from hf_growattn.measure import functional as F
from hf_growattn.measure.bottlenecks import KINDS
from hf_growattn.model import hooks
from hf_growattn.model.configuration import register_type_names
from hf_growattn.model.new_dims import in_order

CONFIG = GrowthConfig(qk_dims=2, v_dims=2, oversampling=4)


def widths(model) -> list[int]:
    return [attention.width_of(role) for attention in attentions(model) for role in ("query", "value")]


def test_growths_stand_in_the_order_in_which_they_came():
    names = [f"growth_{number}" for number in range(1, 13)]
    assert [name for name, _ in in_order(dict.fromkeys(sorted(names)))] == names


def test_a_forward_that_fails_leaves_nothing_behind():
    """Such as one that runs out of memory: activations would stay alive, and a model that holds them has no copy."""
    model = patch_model(build("llama-2"))
    Grower(model, CONFIG).find(lm_batches(2)).keep()
    before = model(tokens()).logits
    attention = attentions(model)[0]
    hook = attention.module.o_proj.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(tokens())
    hook.remove()
    assert hooks._thread.call is None
    assert torch.equal(copy.deepcopy(model)(tokens()).logits, before)


def test_what_accelerate_hooked_before_the_patch_adds_new_values():
    """A hooked module keeps a bound forward, in BERT's family also the one that projects the output."""
    torch.manual_seed(0)
    config = BertConfig(vocab_size=97, hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=32)
    model = BertForMaskedLM(config).eval()
    hooked = copy.deepcopy(model)
    for module in hooked.modules():
        add_hook_to_module(module, ModelHook())
    found = []
    for each in (model, hooked):
        part = attentions(patch_model(each))[0].add_new_dims("growth_1", 2, 2)
        torch.manual_seed(1)
        for parameter in part.parameters():
            torch.nn.init.normal_(parameter)
        sync_config(each)
        found.append(each(tokens()).logits)
    assert torch.equal(*found)


def test_types_whose_hub_names_another_tokenizer_are_known_by_our_name(monkeypatch):
    monkeypatch.setattr(tokenization_auto, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS", {"llama"})
    register_type_names("llama")
    assert "growattn_llama" in tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS


@pytest.mark.parametrize("listed", ["theirs.safetensors", "notes.txt", "../above.safetensors"])
def test_a_save_removes_no_file_that_an_index_names_but_that_is_no_shard(listed, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / listed).write_text("theirs")
    index = {"metadata": {}, "weight_map": {"some.weight": listed}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    patch_model(build("llama-2")).save_pretrained(folder)
    assert (folder / listed).read_text() == "theirs"


def test_inputs_that_nearly_depend_on_each_other_give_no_direction_of_rounding():
    torch.manual_seed(0)
    matrix, clean = torch.randn(1, 12, 20), torch.randn(1, 20, 3)
    twice = torch.cat((clean, clean + 1e-6 * torch.randn_like(clean)), -1)
    noise = 1e-6 * torch.randn(1, 12, 6)  # as passes in fp32 leave
    _, expected, *_ = directions_from_products(clean, matrix @ clean, 3)
    _, found, *_ = directions_from_products(twice, matrix @ twice + noise, 6)
    torch.testing.assert_close(found[..., :3], expected, rtol=1e-3, atol=1e-3)
    assert (found[..., 3:] < 1e-3 * expected[..., :1]).all()


def test_a_growth_is_kept_once():
    model = patch_model(build("llama-2"))
    found = Grower(model, CONFIG).find(lm_batches(4))
    assert found.keep().kept
    grown = widths(model), len(extra_parameters(model))
    for end in (found.keep, found.drop):
        with pytest.raises(RuntimeError, match="This growth was kept"):
            end()
    assert (widths(model), len(extra_parameters(model))) == grown and not found.new_dims


def test_a_growth_that_was_dropped_cannot_be_kept():
    model = patch_model(build("llama-2"))
    found = Grower(model, CONFIG).find(lm_batches(4))
    assert not found.drop().kept
    for end in (found.keep, found.drop):
        with pytest.raises(RuntimeError, match="This growth was dropped"):
            end()
    assert not extra_parameters(model) and model.config.extra_dims == {}


def test_the_fall_is_measured_by_the_other_half(monkeypatch):
    given, seen = lm_batches(8), []
    half_of = {id(batch["input_ids"]): number % 2 for number, batch in enumerate(given)}
    original = growing.compute_losses

    class Noted(growing.Trial):
        def set_steps(self, steps, half=None):
            self.half = seen_half[0] = half
            super().set_steps(steps, half)

    seen_half = [None]
    monkeypatch.setattr(growing, "Trial", Noted)
    monkeypatch.setattr(
        growing,
        "compute_losses",
        lambda objective, batches: (
            seen.extend((seen_half[0], half_of[id(batch["input_ids"])]) for batch in batches)
            or original(objective, batches)
        ),
    )
    assert Grower(patch_model(build("llama-2")), CONFIG).find(given).report.fall
    assert seen and all(found == 1 - measured for found, measured in seen)


def test_a_limit_and_a_multiple_hold_together():
    (attention, *_) = attentions(patch_model(build("llama-2")))
    for former in (0, 3):
        if former:
            attention.add_new_dims("growth_1", former, 0)
        width = attention.width_of("query")
        config = GrowthConfig(qk_dims=20, max_qk_head_dim=width + 13, multiple_of=8)
        dims = config.most_dims(attention, KINDS["qk"])
        assert 0 < dims <= 13 and (width + dims) % 8 == 0


def test_a_folder_that_looks_like_a_hub_id_is_not_published_as_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build("llama-2").save_pretrained("my/llama")
    model = patch_model(type(build("llama-2")).from_pretrained("my/llama"))
    Grower(model, CONFIG).find(lm_batches(2)).keep()
    for there, named in ((True, False), (False, True)):
        if not there:
            (tmp_path / "my").rename(tmp_path / "elsewhere")
        write_card(model, tmp_path / "card")
        assert ("base_model: my/llama" in (tmp_path / "card" / "README.md").read_text()) == named


def test_a_stock_model_is_stock_again_after_several_adapters():
    base = build("llama-2")
    kind, expected = type(base), base(tokens()).logits
    model = peft.get_peft_model(base, GrowAttnConfig(qk_dims=1))
    model.add_adapter("other", GrowAttnConfig(v_dims=1))
    model.unload()
    assert type(base) is kind and torch.equal(base(tokens()).logits, expected)


def test_one_process_of_several_prints(tmp_path, monkeypatch, capsys):
    build("llama-2").save_pretrained(tmp_path)
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        assert main(["inspect", str(tmp_path)]) == 0
        assert bool(capsys.readouterr().out) == (rank == "0")


def test_a_revision_is_that_of_config_model_and_tokenizer(tmp_path, monkeypatch):
    build("llama-2").save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    asked = []
    for auto_class in (AutoConfig, AutoModelForCausalLM, AutoTokenizer):

        def noting(name, *args, read=auto_class.from_pretrained, kind=auto_class, revision=None, **options):
            asked.append((kind, revision))
            assert options["trust_remote_code"] is False  # else transformers asks at a terminal
            return read(name, *args, **options)

        monkeypatch.setattr(auto_class, "from_pretrained", noting)
    checkpoints.load_model(str(tmp_path), revision="v2")
    checkpoints.load_tokenizer(str(tmp_path), revision="v2")
    assert {(AutoConfig, "v2"), (AutoModelForCausalLM, "v2"), (AutoTokenizer, "v2")} <= {*asked}


def test_each_growth_of_a_training_reads_the_rows_before_it(tmp_path, monkeypatch):
    drawn, find = [], Grower.find

    def noting(self, batches):
        drawn.append(torch.cat([batch["input_ids"] for batch in batches]))
        return find(self, batches)

    monkeypatch.setattr(Grower, "find", noting)
    rows = [dict.fromkeys(("input_ids", "labels"), row) for row in tokens(40, 9, seed=3)]
    options = TrainingArguments(tmp_path, max_steps=5, per_device_train_batch_size=2, report_to=[], use_cpu=True)
    trainer = Trainer(patch_model(build("llama-2")), options, train_dataset=rows)
    trainer.add_callback(GrowthCallback(trainer, CONFIG, steps=[2, 4], batches=2))
    trainer.train()
    assert len(drawn) == 2 and drawn[0].shape == drawn[1].shape and not torch.equal(*drawn)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("update_existing", [True, False])
def test_new_dims_are_in_the_mode_of_their_model(update_existing, training):
    def modes() -> set[bool]:
        parts = [part for attention in attentions(model) for part in attention.growths.values()]
        return {module.training for part in parts for module in part.modules()}

    model = patch_model(build("llama-2")).train(training)
    assert Grower(model, replace(CONFIG, update_existing=update_existing)).find(lm_batches(4)).keep().kept
    assert modes() == {training}


def test_new_dims_of_another_precision_read_both_inputs():
    """As beside quantized weights: new dims are fp32 there, and what comes in is not."""
    model = patch_model(build("llama-2"))
    part = attentions(model)[0].make_new_dims(2, 3)
    with torch.no_grad():
        part.in_proj.weight.normal_()
    inputs, source = torch.randn(2, 1, 5, model.config.hidden_size).bfloat16()
    for found, expected in zip(part.in_proj(inputs, source), part.in_proj(inputs.float(), source.float())):
        assert torch.equal(found, expected)


def test_merged_adapters_count_once():
    model = patch_model(build("llama-2"))
    options = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted, attention = peft.get_peft_model(model, options), attentions(model)[0]
    plain, expected = (attention.factors_of("query", torch.float64, adapters=on) for on in (False, True))
    assert (expected - plain).abs().max() > 0.01
    adapted.merge_adapter()
    torch.testing.assert_close(attention.factors_of("query", torch.float64), expected, rtol=0, atol=1e-6)


def test_an_adapter_of_ours_takes_no_continuous_batching():
    model = peft.get_peft_model(build("llama-2"), GrowAttnConfig(qk_dims=2)).get_base_model()
    with pytest.raises(ValueError, match="Continuous batching keeps"):
        model.init_continuous_batching()


def test_a_damaged_checkpoint_in_a_subfolder_is_told_of(tmp_path):
    model = patch_model(build("llama-2"))
    model.save_pretrained(tmp_path / "inner", max_shard_size="20kB")
    index = tmp_path / "inner" / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(ValueError, match=r"is not an index of weights\. Copy, download or save it again"):
        type(model).from_pretrained(tmp_path, subfolder="inner")


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "20kB"}])
def test_a_config_replaces_the_former_one_when_its_weights_are_there(options, tmp_path, monkeypatch):
    """Until then the former checkpoint loads from there, should the process be killed."""
    moved = []

    def noting(source, target, move=os.replace):
        moved.append(Path(target).name)
        move(source, target)

    monkeypatch.setattr(os, "replace", noting)
    patch_model(build("llama-2")).save_pretrained(tmp_path / "model", **options)
    index = ["model.safetensors.index.json"] if options else []
    assert moved[-1 - len(index) :] == [*index, "config.json"] and len(moved) > 2


def test_of_offers_that_are_worth_as_much_the_first_is_taken():
    assert F.allocate([[2.0], [2.0], [2.0]], [[4], [4], [4]], 9) == [1, 1, 0]


def test_a_config_that_was_passed_on_stays_as_it_was():
    """Other models may hold it."""
    stock = build("llama-2")
    given, before = stock.config, copy.deepcopy(stock.config.to_dict())
    patch_model(stock).config.rope_parameters["rope_theta"] = 5.0
    assert given.to_dict() == before


def test_a_model_that_grew_twice_knows_where_it_came_from():
    model = patch_model(build("llama-2"))
    model.config.name_or_path = "someone/base"
    for _ in range(2):
        assert Grower(model, CONFIG).find(lm_batches(4)).keep().kept
    assert origin_of(model) == "someone/base"


def test_a_layer_that_is_named_twice_grows_once():
    reports = [
        Grower(patch_model(build("llama-2")), replace(CONFIG, layers=layers)).measure(lm_batches(4))
        for layers in ([1], [1, 1])
    ]
    assert reports[0] == reports[1]


def test_a_frozen_bias_is_not_rewritten():
    model = patch_model(build("llama-5-bias"))
    attentions(model)[0].module.q_proj.bias.requires_grad_(False)
    with pytest.raises(ValueError, match="q_proj of layer 0 is frozen"):
        Grower(model, replace(CONFIG, update_existing=True)).find(lm_batches(4))


def test_pickled_weights_are_not_read(tmp_path):
    model = patch_model(build("llama-2"))
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        type(model).from_pretrained(tmp_path)
