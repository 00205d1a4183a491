"""The ways to train: as many weights each, nothing else moved, and what grew at a learning rate of its own."""

import encoders
import families
import pytest
import torch
from datasets import Dataset
from families import word_tokenizer
from transformers import TrainerCallback
from trl import SFTConfig

from hf_growattn import Grower, patch_model
from hf_growattn.growable.attention import attentions
from hf_growattn.growable.growths import sync_config
from hf_growattn.training import methods
from hf_growattn.training.data import Prepared
from hf_growattn.training.methods import METHODS, choose_rank, make_trainer, prepare_model, weights_of_rank_one


@pytest.mark.parametrize("variant", ["llama-2", "gpt2-2", "bert"])
def test_every_method_trains_as_many_weights(variant):
    """LoRA exactly the budget, growth at most that; neither moves the rest of the base."""
    build = encoders.build if variant in encoders.ENCODERS else families.build
    stock = build(variant)
    patched = patch_model(build(variant))
    rank = choose_rank(patched, 0.3)
    assert rank >= 3
    budget = rank * weights_of_rank_one(patched)
    ids = torch.randint(0, stock.config.vocab_size, (4, 4, 16), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": rows, "labels": rows} for rows in ids]
    for name in ("lora", "growth", "both"):
        model, report = prepare_model(patch_model(build(variant)), METHODS[name], rank, batches, seed=0)
        weights = model.num_parameters(only_trainable=True)
        if name == "lora":
            assert weights == budget and report is None
        assert 0 < weights <= budget
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        model(**batches[0]).loss.backward()
        optimizer.step()
        embeddings = model.get_input_embeddings().weight
        assert embeddings.equal(stock.get_input_embeddings().weight) and not embeddings.requires_grad


@pytest.mark.parametrize("variant", ["llama-5-bias", "gpt2-2"])
def test_a_mix_leaves_alone_what_grew_before(variant):
    """The new dims of another training belong to no budget of this one."""
    model = patch_model(families.build(variant))
    for attention in attentions(model):
        attention.add_new_dims("growth_1", qk_dims=2, v_dims=6)
    sync_config(model)
    rank, base = choose_rank(model, 0.3), model.num_parameters()
    budget = rank * weights_of_rank_one(model)
    ids = torch.randint(0, model.config.vocab_size, (4, 4, 16), generator=torch.Generator().manual_seed(0))
    mix, report = prepare_model(model, METHODS["both"], rank, [{"input_ids": r, "labels": r} for r in ids], seed=0)
    adapters = sum(p.numel() for name, p in mix.named_parameters() if "lora_" in name)
    added = sum(p.numel() for p in mix.parameters()) - base - adapters
    assert report.kept and added > 0 and mix.num_parameters(only_trainable=True) == added + adapters <= budget


@pytest.mark.parametrize("width, share", [(16, 1.0), (64, 1.0), (256, 0.125), (4096, 1 / 30)])
def test_what_grew_beside_lora_takes_smaller_steps_in_wider_models(width, share):
    assert METHODS["both"].grown_share(width) == share
    assert {METHODS[name].grown_share(width) for name in METHODS if name != "both"} == {1.0}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # TRL's own setting
@pytest.mark.parametrize("name", ["both", "growth"])
def test_a_mix_trains_at_two_learning_rates(name, tmp_path):
    rows = Dataset.from_dict({"input_ids": [list(range(2, 18))] * 16, "labels": [list(range(2, 18))] * 16})
    batch = {name: torch.tensor(rows[name][:4]) for name in rows.column_names}
    training = SFTConfig(str(tmp_path), max_steps=4, learning_rate=1e-2, use_cpu=True, bf16=False, report_to=[])
    stock, found = patch_model(families.build("llama-5-bias")), []
    model, _ = prepare_model(stock, METHODS[name], choose_rank(stock, 0.3), [batch, batch], seed=0)

    class Watch(TrainerCallback):
        def on_optimizer_step(self, args, state, control, optimizer, model, **kwargs):
            adapters = {p for key, p in model.named_parameters() if "lora_" in key}
            pairs = ((group["lr"], p in adapters) for group in optimizer.param_groups for p in group["params"])
            found.append({(round(rate, 9), adapter) for rate, adapter in pairs})

    trainer = make_trainer(
        model, Prepared(rows, None, list, word_tokenizer(), training), 0.1 if name == "both" else 1.0
    )
    trainer.add_callback(Watch())
    trainer.train()
    held = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    assert {*held} == {p for p in model.parameters() if p.requires_grad} and len({*held}) == len(held)
    mix = name == "both"
    for rate, rates in zip((1e-2, 7.5e-3, 5e-3, 2.5e-3), found, strict=True):  # linear, as Trainer has it
        assert rates == ({(rate, True), (round(0.1 * rate, 9), False)} if mix else {(rate, False)})


@pytest.mark.parametrize("name, trains", [("growth", False), ("both", True)])
def test_growth_on_a_frozen_base_does_the_work_of_old_dims_too(name, trains, monkeypatch):
    """LoRA moves the old dims; without it nothing does, and new ones must not leave it to them."""
    configs = []

    def record(model, config, **options):
        configs.append(config)
        return Grower(model, config, **options)

    monkeypatch.setattr(methods, "Grower", record)
    model = patch_model(families.build("llama-2"))
    ids = torch.randint(0, model.config.vocab_size, (4, 4, 16), generator=torch.Generator().manual_seed(0))
    prepare_model(model, METHODS[name], 3, [{"input_ids": rows, "labels": rows} for rows in ids], seed=0)
    assert [config.old_dims_train for config in configs] == [trains]
